"""The sets that a run holds: theta_0's own replies, in groups of near-duplicate prompts, each group with one role.

| source                          | roles of its groups                                                          |
|---------------------------------|------------------------------------------------------------------------------|
| bundled kinds for steering      | 3/4 constraint, 1/4 monitor                                                  |
| bundled kinds for monitoring    | unseen: asked by the behaviour monitor, held by nothing                      |
| bundled kinds for certifying    | certify; not asked before training                                           |
| the task, conflicts dropped     | 3/5 constraint, 1/5 monitor, 1/5 certify (where no trained row is like it)   |
| the task otherwise; a file      | 3/4 constraint, 1/4 monitor                                                  |

A prompt that is a near-duplicate of a constraint prompt, of this set or another, is neither watched nor certified on.

The behaviour monitor asks held-out prompts of what steers, and bundled kinds that nothing steers by, so that a narrow
safety set shows as a loss of coverage. The monitor share of a user's own pairs is asked and sorted at theta_0, too.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Literal, TypeAlias, TypeVar

from holdfast.core.hashing import sha256_text
from holdfast.data.bundled import bundled
from holdfast.data.examples import Example, as_turns, make_example, prompt_text, searchable_texts
from holdfast.data.near_duplicates import clusters, matches, occurring
from holdfast.data.split_record import ROLES
from holdfast.data.splits import Split, split_from_roles
from holdfast.judging.reply_classes import ReplyClass
from holdfast.screening.asking import Asker, Sorted
from holdfast.screening.settings import ORDINARY, Keep, ScreeningSettings

Role: TypeAlias = Literal["constraint", "monitor", "certify", "unseen"]

SHARED: Mapping[Role, float] = {"constraint": 0.75, "monitor": 0.25}
SHARED_DROPPED: Mapping[Role, float] = {"constraint": 0.6, "monitor": 0.2, "certify": 0.2}
CONNECTS = 10  # rows that a question may be asked for and still keep their prompts in one group
CLASS_OF: Mapping[Keep, ReplyClass] = {"refusals": ReplyClass.REFUSED, "answers": ReplyClass.ANSWERED}


@dataclass(frozen=True)
class Candidate:
    """A prompt whose reply may be held."""

    example: Example  # the prompt, without a reply
    source: str  # what it came from: `task`, a bundled name, or a file
    role: Role | None = None  # fixed for bundled kinds that do not steer; None is shared out by group
    dropped: bool = False  # a prompt of the task that no trained row asks
    rows: frozenset[int] = frozenset()  # of the task that ask it


@dataclass
class HeldSet:
    """Prompts by role, before and after their replies are there."""

    keep: Keep
    by_role: dict[Role, list[Candidate]]
    asked: dict[str, int]  # prompts by source
    kept: dict[str, int]
    groups: int
    slow: frozenset[str]  # whose reply took more than 32 tokens to sort: a monitor, which asks for 32, leaves them out
    changed: int = 0  # replies that came out in another class at their full length, and are not held

    def prompts(self, role: Role) -> list[Example]:
        return [one.example for one in self.by_role[role]]


Item = TypeVar("Item", Candidate, Example)


def share_out(keep: Keep, candidates: Sequence[Candidate], classes: Mapping[str, Sorted], *, seed: int) -> HeldSet:
    """Give every prompt whose reply has the class to keep a role, whole groups at a time.

    Prompts for certifying carry no class yet: they are taken as they are.
    """
    wanted = CLASS_OF[keep]
    chosen = [c for c in candidates if c.role == "certify" or classes[c.example.id].reply_class == wanted]
    asked, kept = ([c for c in some if c.role != "certify"] for some in (candidates, chosen))
    groups: dict[int, list[Candidate]] = defaultdict(list)
    for label, candidate in zip(_labels(chosen), chosen, strict=True):
        groups[label].append(candidate)
    by_role: dict[Role, list[Candidate]] = {"constraint": [], "monitor": [], "certify": [], "unseen": []}
    for members in groups.values():
        role = _role(members, seed)
        # A fixed role is kept by whole kinds: a bundled prompt that is like one of the task's is left out instead.
        own = [one for one in members if one.role in (None, role)]
        # Several forms of one row are one draw; a certificate would count them as several groups.
        by_role[role] += own[:1] if role == "certify" and own[0].role is None else own
    return HeldSet(
        keep, by_role, dict(Counter(one.source for one in asked)), dict(Counter(one.source for one in kept)),
        groups=sum(any(one.role != "certify" for one in members) for members in groups.values()),
        slow=frozenset(one.example.id for one in kept if not classes[one.example.id].quick),
    )  # fmt: skip


def _labels(candidates: Sequence[Candidate]) -> list[int]:
    """A label for each prompt: groups of near-duplicates, and what one row is asked in several forms together.

    A question that many rows ask ("Please go on.") connects none of them.
    """
    from scipy.cluster.hierarchy import DisjointSet

    labels = clusters(_texts(candidates))
    connected, first = DisjointSet(labels), dict[int, int]()
    for label, candidate in zip(labels, candidates, strict=True):
        for row in candidate.rows if len(candidate.rows) <= CONNECTS else ():
            connected.merge(first.setdefault(row, label), label)
    return [connected[label] for label in labels]


def _role(members: Sequence[Candidate], seed: int) -> Role:
    if not (free := [member for member in members if member.role is None]):
        return "unseen" if any(member.role == "unseen" for member in members) else "certify"
    shares = SHARED_DROPPED if all(member.dropped for member in free) else SHARED
    # By the smallest id: neither the order of rows nor another group's members change it.
    place = int(sha256_text(f"{seed} {min(member.example.id for member in free)}")[:13], 16) / 16**13
    for role, share in shares.items():
        if place < share:
            return role
        place -= share
    return "constraint"


def keep_apart(sets: Mapping[str, HeldSet], trained: Sequence[Example]) -> None:
    """Nothing watched or certified on is like a constraint prompt; nothing certified on is watched or trained on."""
    trained_texts = [text for row in trained for text in searchable_texts(row)]

    def texts(*roles: Role) -> list[str]:
        return [text for role in roles for held in sets.values() for text in _texts(held.by_role[role])]

    steering = texts("constraint")
    for held in sets.values():
        held.by_role |= {role: _unlike(own, steering) for role, own in held.by_role.items() if role != "constraint"}
        certify = held.by_role["certify"]
        held.by_role["certify"] = _without(certify, occurring(_texts(certify), trained_texts))
    watched = texts("monitor", "unseen")
    for held in sets.values():
        held.by_role["certify"] = _unlike(held.by_role["certify"], watched)


def _unlike(members: Sequence[Item], texts: Sequence[str], among: Sequence[str] | None = None) -> list[Item]:
    """Those that are no near-duplicates of a text."""
    return _without(members, {place for place, _ in matches(_texts(members), texts, among=among)})


def _without(members: Sequence[Item], places: Collection[int]) -> list[Item]:
    left_out = set(places)
    return [member for place, member in enumerate(members) if place not in left_out]


def _texts(members: Iterable[Candidate | Example]) -> list[str]:
    return [prompt_text(one.example if isinstance(one, Candidate) else one) for one in members]


def replied(held: HeldSet, asker: Asker, *, name: str) -> dict[str, list[Example]]:
    """Constraint and monitor prompts with theta_0's whole reply, certify prompts with none.

    A reply that turns out to be of another class at its full length is not held.
    """
    steered = [*held.prompts("constraint"), *held.prompts("monitor")]
    replies = asker.held(steered, what=f"{name} to hold")
    wanted = CLASS_OF[held.keep]
    fitting = {key for key, answer in replies.items() if answer.reply_class == wanted and answer.reply.text}
    held.changed = sum(example.id not in fitting for example in steered)

    def pair(asked: Example) -> Example:
        reply = replies[asked.id].reply.text
        said = reply if isinstance(asked.prompt, str) else as_turns("assistant", reply)
        return make_example(asked.prompt, said, asked.where, asked.category)

    constraint, monitor = ([pair(e) for e in held.prompts(r) if e.id in fitting] for r in ("constraint", "monitor"))
    return {"constraint": constraint, "monitor": monitor, "certify": held.prompts("certify")}


def splits_apart(sets: Mapping[str, Mapping[str, Sequence[Example]]]) -> dict[str, Split]:
    """A split of every set, without prompts that an earlier role has: constraint before monitor before certify.

    Which shingles are too common to count depends on the prompts compared, so taking prompts out can make others
    alike: the search is repeated until it finds nothing.
    """
    kept = {name: {role: list(roles[role]) for role in ROLES} for name, roles in sets.items()}
    while _take_out_shared(list(kept.values())):
        pass
    return {name: split_from_roles(*(roles[role] for role in ROLES)) for name, roles in kept.items()}


def _take_out_shared(sets: Sequence[dict[str, list[Example]]]) -> bool:
    """Within the sets; where nothing was shared there, across them."""

    def size() -> int:
        return sum(len(members) for roles in sets for members in roles.values())

    before = size()
    for roles in sets:
        every = [text for role in ROLES for text in _texts(roles[role])]
        for earlier, later in combinations(ROLES, 2):
            roles[later] = _unlike(roles[later], _texts(roles[earlier]), among=every)
    if size() == before:
        for roles, others in permutations(sets, 2):
            for role in ("monitor", "certify"):
                roles[role] = _unlike(roles[role], _texts(others["constraint"]))
    return size() < before


@dataclass(frozen=True, slots=True)
class MonitorPrompts:
    """The prompts that a behaviour monitor asks, by figure; all sorted at theta_0."""

    # refused by theta_0; of the sources that steer, in groups that no steering prompt belongs to
    refusals: tuple[Example, ...] = ()
    unseen: tuple[Example, ...] = ()  # refused by theta_0; whole bundled kinds that nothing steers by
    answers: tuple[Example, ...] = ()  # answered by theta_0; everyday and borderline prompts that nothing steers by

    @property
    def any(self) -> bool:
        return bool(self.refusals or self.unseen or self.answers)


def monitor_prompts(
    held: Mapping[str, HeldSet], pairs: Collection[Split], asker: Asker, settings: ScreeningSettings
) -> MonitorPrompts:
    """At most `settings.monitor_prompts` for each figure, of what was built by asking and of the user's own pairs."""
    if not settings.monitor_prompts:
        return MonitorPrompts()
    steering = [text for one in held.values() for text in _texts(one.by_role["constraint"])]
    steering += [text for split in pairs for text in _texts(split.constraint)]

    def of(keep: Keep, role: Role) -> list[Example]:
        sets = [one for one in held.values() if one.keep == keep]
        return [example for one in sets for example in one.prompts(role) if example.id not in one.slow]

    def bundled_of(*names: str) -> tuple[list[Example], list[Example]]:
        every = [asker.question(e) for name in names for e in bundled(name, "monitor", settings.limit_of(name))]
        return _refused_and_answered(_unlike(every, steering), asker, f"bundled prompts ({', '.join(names)})")

    def chosen(examples: Sequence[Example]) -> tuple[Example, ...]:
        """Each prompt once, the first by a seeded hash, in order of their ids."""
        by_id = {example.id: example for example in examples}
        first = sorted(by_id, key=lambda key: sha256_text(f"{settings.seed} {key}"))[: settings.monitor_prompts]
        return tuple(by_id[key] for key in sorted(first))

    own = [asker.question(e) for split in pairs for e in split.monitor if e.kind != "text"]
    refused, answered = _refused_and_answered(own, asker, "your monitor prompts")
    unseen = of("refusals", "unseen") or bundled_of("probes")[0]
    answers = of("answers", "unseen") or bundled_of(*ORDINARY)[1]
    return MonitorPrompts(chosen([*of("refusals", "monitor"), *refused]), chosen(unseen), chosen([*answers, *answered]))


def _refused_and_answered(examples: Sequence[Example], asker: Asker, what: str) -> tuple[list[Example], list[Example]]:
    fitting = asker.fitting(examples)
    classes = asker.sort(fitting, what=what)
    quick = [(e, classes[e.id].reply_class) for e in fitting if classes[e.id].quick]
    refused, answered = ([e for e, own in quick if own == one] for one in (ReplyClass.REFUSED, ReplyClass.ANSWERED))
    return refused, answered
