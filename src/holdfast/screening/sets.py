"""The sets that a run holds: theta_0's own replies, in groups of near-duplicate prompts, each group with one role.

| source                          | roles of its groups                                                          |
|---------------------------------|------------------------------------------------------------------------------|
| bundled kinds for steering      | 3/4 constraint, 1/4 monitor                                                  |
| bundled kinds for monitoring    | unseen: asked by the behaviour monitor, held by nothing                      |
| bundled kinds for certifying    | certify; not asked before training                                           |
| the task, conflicts dropped     | 3/5 constraint, 1/5 monitor, 1/5 certify (where no trained row is like it)   |
| the task otherwise; a file      | 3/4 constraint, 1/4 monitor                                                  |

A set that keeps answers takes of the probes the kinds for steering alone (`uses_of`).

A prompt that is a near-duplicate of a constraint prompt, of this set or another, is neither watched nor certified on;
the roles of a split share no prompt, exactly or nearly, within a set and across sets.

The behaviour monitor asks held-out prompts of what steers, and bundled kinds that nothing steers by. A user's own pairs
get the same monitor: their monitor share is asked and sorted at theta_0, and the bundled kinds for monitoring are asked
beside it, so that a narrow safety set shows as a loss of coverage.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
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
from holdfast.screening.questions import as_question
from holdfast.screening.settings import ORDINARY, Keep, ScreeningSettings

Role: TypeAlias = Literal["constraint", "monitor", "certify", "unseen"]
Item = TypeVar("Item")

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
    asked: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    groups: int = 0
    # prompts whose reply took more than 32 tokens to sort: a monitor, which asks for 32, does not watch them
    slow: frozenset[str] = frozenset()
    changed: int = 0  # replies that came out in another class at their full length, and are not held

    def prompts(self, role: Role) -> list[Example]:
        return [one.example for one in self.by_role[role]]


def share_out(keep: Keep, candidates: Sequence[Candidate], classes: Mapping[str, Sorted], *, seed: int) -> HeldSet:
    """Give every prompt whose reply has the class to keep a role, whole groups at a time.

    Prompts for certifying carry no class yet: they are taken as they are.
    """
    wanted = CLASS_OF[keep]
    chosen = [c for c in candidates if c.role == "certify" or classes[c.example.id].reply_class == wanted]
    groups: dict[int, list[Candidate]] = {}
    for label, candidate in zip(_labels(chosen), chosen, strict=True):
        groups.setdefault(label, []).append(candidate)
    by_role: dict[Role, list[Candidate]] = {"constraint": [], "monitor": [], "certify": [], "unseen": []}
    for members in groups.values():
        role = _role(members, seed)
        # A fixed role is kept by whole kinds: a bundled prompt that is like one of the task's is left out instead.
        fitting = [one for one in members if one.role in (None, role)]
        # Several forms of one row are one draw; a certificate would count them as several groups.
        by_role[role] += fitting[:1] if role == "certify" and fitting[0].role is None else fitting
    asked = Counter(one.source for one in candidates if one.role != "certify")
    kept = Counter(one.source for one in chosen if one.role != "certify")
    held = sum(any(one.role != "certify" for one in members) for members in groups.values())
    slow = frozenset(one.example.id for one in chosen if one.role != "certify" and not classes[one.example.id].quick)
    return HeldSet(keep, by_role, dict(asked), dict(kept), groups=held, slow=slow)


def _labels(candidates: Sequence[Candidate]) -> list[int]:
    """A label for each prompt: groups of near-duplicates, and what one row is asked in several forms together.

    A question that many rows ask ("Please go on.") connects none of them.
    """
    from scipy.cluster.hierarchy import DisjointSet

    labels = clusters(_texts([candidate.example for candidate in candidates]))
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
    steering = [text for held in sets.values() for text in _texts(held.prompts("constraint"))]
    roles: tuple[Role, ...] = ("monitor", "unseen", "certify")
    for held in sets.values():
        for role in roles:
            held.by_role[role] = _without(held.by_role[role], _near(held.prompts(role), steering))
        seen = occurring(_texts(held.prompts("certify")), trained_texts)
        held.by_role["certify"] = _without(held.by_role["certify"], set(seen))
    watched = [text for held in sets.values() for role in roles[:2] for text in _texts(held.prompts(role))]
    for held in sets.values():
        held.by_role["certify"] = _without(held.by_role["certify"], _near(held.prompts("certify"), watched))


def _near(examples: Sequence[Example], texts: Sequence[str], among: Sequence[str] | None = None) -> set[int]:
    return {place for place, _ in matches(_texts(examples), texts, among=among)}


def _without(members: Sequence[Item], places: Collection[int]) -> list[Item]:
    return [member for place, member in enumerate(members) if place not in places]


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

    roles: tuple[Role, ...] = ("constraint", "monitor")
    held_pairs = {str(role): [pair(e) for e in held.prompts(role) if e.id in fitting] for role in roles}
    return held_pairs | {"certify": held.prompts("certify")}


def splits_apart(sets: Mapping[str, Mapping[str, Sequence[Example]]]) -> dict[str, Split]:
    """A split of every set, without prompts that an earlier role has: constraint before monitor before certify.

    Which shingles are too common to count depends on the prompts compared, so taking prompts out can make others
    alike: the search is repeated until it finds nothing.
    """
    kept = {name: {role: list(roles[role]) for role in ROLES} for name, roles in sets.items()}
    while _take_out_shared(kept):
        pass
    return {name: split_from_roles(*(roles[role] for role in ROLES)) for name, roles in kept.items()}


def _take_out_shared(sets: Mapping[str, dict[str, list[Example]]]) -> bool:
    changed = False
    for roles in sets.values():
        every = [text for role in ROLES for text in _texts(roles[role])]
        for earlier, later in combinations(("constraint", "monitor", "certify"), 2):
            near = _near(roles[later], _texts(roles[earlier]), among=every)
            roles[later] = _without(roles[later], near)
            changed |= bool(near)
    if changed:
        return True
    for roles, others in permutations(sets.values(), 2):
        for role in ("monitor", "certify"):
            near = _near(roles[role], _texts(others["constraint"]))
            roles[role] = _without(roles[role], near)
            changed |= bool(near)
    return changed


def _texts(examples: Sequence[Example]) -> list[str]:
    return [prompt_text(example) for example in examples]


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
    held: Mapping[str, HeldSet], pairs: Collection[Split], asker: Asker, settings: ScreeningSettings, *, plain: bool
) -> MonitorPrompts:
    """At most `settings.monitor_prompts` for each figure, of what was built by asking and of the user's own pairs."""
    if not settings.monitor_prompts:
        return MonitorPrompts()
    steering = [text for one in held.values() for text in _texts(one.prompts("constraint"))]
    steering += [text for split in pairs for text in _texts(split.constraint)]
    own = [as_question(e.prompt, e, plain=plain) for split in pairs for e in split.monitor if e.kind != "text"]
    refused, answered = _refused_and_answered(own, asker, "your monitor prompts")
    unseen = _of(held, "refusals", "unseen") or _bundled(("probes",), asker, steering, settings, plain=plain)[0]
    answers = _of(held, "answers", "unseen") or _bundled(ORDINARY, asker, steering, settings, plain=plain)[1]

    def chosen(examples: Sequence[Example]) -> tuple[Example, ...]:
        """Each prompt once, the first by a seeded hash, in order of their ids."""
        by_id = {example.id: example for example in examples}
        first = sorted(by_id, key=lambda key: sha256_text(f"{settings.seed} {key}"))[: settings.monitor_prompts]
        return tuple(by_id[key] for key in sorted(first))

    watched = [*_of(held, "refusals", "monitor"), *refused]
    return MonitorPrompts(refusals=chosen(watched), unseen=chosen(unseen), answers=chosen([*answers, *answered]))


def _of(held: Mapping[str, HeldSet], keep: str, role: Role) -> list[Example]:
    sets = [one for one in held.values() if one.keep == keep]
    return [example for one in sets for example in one.prompts(role) if example.id not in one.slow]


def _bundled(
    names: Sequence[str], asker: Asker, steering: Sequence[str], settings: ScreeningSettings, *, plain: bool
) -> tuple[list[Example], list[Example]]:
    every = [
        as_question(e.prompt, e, plain=plain)
        for name in names
        for e in bundled(name, "monitor", settings.limit_of(name))
    ]
    return _refused_and_answered(
        _without(every, _near(every, steering)), asker, f"bundled prompts ({', '.join(names)})"
    )


def _refused_and_answered(examples: Sequence[Example], asker: Asker, what: str) -> tuple[list[Example], list[Example]]:
    fitting = asker.fitting(examples)
    classes = asker.sort(fitting, what=what)

    def of(wanted: ReplyClass) -> list[Example]:
        return [e for e in fitting if classes[e.id].reply_class == wanted and classes[e.id].quick]

    return of(ReplyClass.REFUSED), of(ReplyClass.ANSWERED)
