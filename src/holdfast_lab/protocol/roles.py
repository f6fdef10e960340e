"""Who sees which data: eight roles drawn from the public data sets, no two of which share a prompt.

| role       | drawn from      | used for                                              |
|------------|-----------------|-------------------------------------------------------|
| evaluation | harmful prompts | the harm score                                        |
| certify    | safe pairs      | the certificate, opened once                          |
| monitor    | safe pairs      | looked at during training                             |
| constraint | safe pairs      | steers training (the align pairs, unless it has a size) |
| align      | safe pairs      | the alignment stage                                   |
| asked      | unsafe pairs    | prompts to which the aligned model's own replies are kept |
| poison     | unsafe pairs    | mixed into the task data by the attacker              |
| harmful    | unsafe pairs    | what some defenses train against                      |

Roles are drawn in this order. A group of matching prompts (`groups`) belongs to the first role that draws from it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.hashing import sha256_lines
from holdfast.core.seeding import generator
from holdfast.data.examples import Example, make_example, normalise, prompt_text
from holdfast.data.near_duplicates import contained
from holdfast.data.tasks import PAPER, PROTOCOLS
from holdfast_lab.data.catalogue import CATEGORIES, Collection, load

ROLES = ("evaluation", "certify", "monitor", "constraint", "align", "asked", "poison", "harmful")
# All others draw safe pairs.
_POOL = {"evaluation": "evaluation", "asked": "unsafe", "poison": "unsafe", "harmful": "unsafe"}
# Held-out figures count independent prompts, so these take one pair of a group.
_ONE_OF_A_GROUP = ("certify", "monitor", "asked")
SafeSource = Literal["beavertails", "refusals"]
HarmPrompts = Literal["beavertails_test", "beavertails_evaluation"]
GROUP_RULE = "one prompt holds 4/5 of the word 3-shingles of the other; whole words under 5 words, exact under 3"


@dataclass(frozen=True)
class Pools:
    """Three pools, each sorted by id, so that nothing depends on the order of the files."""

    safe: tuple[Example, ...]  # for align, constraint, monitor and certify
    unsafe: tuple[Example, ...]  # for poison and harmful
    evaluation: tuple[Example, ...]  # harmful prompts, one example each, with an empty completion
    sources: tuple[dict[str, Any], ...]  # the collections behind them, without their rows
    skipped: dict[str, int]  # rows left out, by reason; a pair (prompt and reply) labelled safe and unsafe is neither
    contradictory: int  # prompts (normalised) with a safe and an unsafe pair


def read_pools(safe: str, harm_prompts: str, *, folder: Path | None = None) -> Pools:
    """Load what the roles need.

    `safe` is `beavertails` (its safe train pairs) or `refusals`; `harm_prompts` is `beavertails_test` (prompts with an
    unsafe reply) or `beavertails_evaluation`.
    """
    train, harmful = load("beavertails", "train", folder=folder), _harmful(harm_prompts, folder)
    used = [train, harmful, *([load("refusals", folder=folder)] if safe == "refusals" else [])]
    safe_source = used[2] if safe == "refusals" else train
    skipped: Counter[str] = Counter(empty_responses=0, duplicates=0)
    safe_pairs, unsafe_pairs = _pairs(safe_source, skipped, safe=True), _pairs(train, skipped, safe=False)
    shared = {_key(e) for e in safe_pairs} & {_key(e) for e in unsafe_pairs}
    if both := {e.id for e in safe_pairs} & {e.id for e in unsafe_pairs}:
        skipped["pairs_of_both_labels"] = len(both)
    return Pools(
        safe=tuple(e for e in safe_pairs if e.id not in both),
        unsafe=tuple(e for e in unsafe_pairs if e.id not in both),
        evaluation=_prompts(harmful),
        sources=tuple(collection.describe() for collection in used),
        skipped=dict(skipped),
        contradictory=len(shared),
    )


def _harmful(harm_prompts: str, folder: Path | None) -> Collection:
    return load("beavertails" if harm_prompts == "beavertails_test" else harm_prompts, "test", folder=folder)


def _key(example: Example) -> str:
    return normalise(prompt_text(example))


def _rows(source: Collection, safe: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows with this label, where there is one, and their places."""
    for place, row in enumerate(source.rows):
        if row.get("is_safe", safe) == safe:
            yield f"row {place} of {source.name} {source.split}", row


def _pairs(source: Collection, skipped: Counter[str], *, safe: bool) -> tuple[Example, ...]:
    found: dict[str, Example] = {}
    for where, row in _rows(source, safe):
        if not row["response"].strip():
            skipped["empty_responses"] += 1
            continue
        example = make_example(row["prompt"], row["response"], where, next(iter(row.get("categories") or ()), None))
        skipped["duplicates"] += example.id in found
        found.setdefault(example.id, example)
    return tuple(found[key] for key in sorted(found))


def _prompts(source: Collection) -> tuple[Example, ...]:
    """One example per normalised prompt; of several spellings the one with the smallest id.

    Its category is the one that most of its unsafe replies have, the first of them in beaver-dam's order.
    """
    named: dict[str, Counter[str]] = {}
    found: dict[str, Example] = {}
    for where, row in _rows(source, safe=False):
        example = make_example(row["prompt"], "", where)
        key = _key(example)
        named.setdefault(key, Counter()).update(row["categories"] or () if "categories" in row else [row["category"]])
        if key not in found or example.id < found[key].id:
            found[key] = example

    def usual(names: Counter[str]) -> str | None:
        return min(names, key=lambda name: (-names[name], CATEGORIES.index(name)), default=None)

    examples = (make_example(one.prompt, "", one.where, usual(named[key])) for key, one in found.items())
    return tuple(sorted(examples, key=lambda example: example.id))


@dataclass(frozen=True)
class RoleSettings:
    """Sources and sizes of the roles; run and study files check theirs (`runs.config.schema.RolesBlock`)."""

    safe: SafeSource  # where safe pairs come from
    # where evaluation prompts come from: the test split's prompts with an unsafe reply, or BeaverTails-Evaluation
    harm_prompts: HarmPrompts
    align: int  # align, monitor, certify, asked, harmful, poison, evaluation: examples of the role
    constraint: int | None  # examples of a role of its own; None takes the align pairs themselves
    monitor: int
    certify: int
    harmful: int
    poison: int
    evaluation: int
    seed: int  # of every draw; each role has its own stream
    asked: int = 0


@dataclass(frozen=True)
class Roles:
    """The examples of every role, in the order in which they were drawn, and a record without any text."""

    align: tuple[Example, ...]
    constraint: tuple[Example, ...]
    monitor: tuple[Example, ...]
    certify: tuple[Example, ...]
    harmful: tuple[Example, ...]
    poison: tuple[Example, ...]
    evaluation: tuple[Example, ...]
    asked: tuple[Example, ...]
    record: dict[str, Any]


def draw_roles(settings: RoleSettings, *, folder: Path | None = None) -> Roles:
    """Draw every role; `folder` as for `catalogue.load`.

    The draw depends on the rows and the seed, not on the order of the files. A role that asks for fewer examples gets
    the first ones of the larger draw, as long as the roles before it stay the same.
    """
    pools = read_pools(settings.safe, settings.harm_prompts, folder=folder)
    examples = [*pools.safe, *pools.unsafe, *pools.evaluation]
    grouped = groups([prompt_text(example) for example in examples])
    labels = {example.id: label for example, label in zip(examples, grouped, strict=True)}
    owner: dict[int, str] = {}
    drawn: dict[str, tuple[Example, ...]] = {}
    for role in ROLES:
        if getattr(settings, role) is not None:
            drawn[role] = _draw(role, settings, pools, labels, owner)
            owner.update((labels[example.id], role) for example in drawn[role])
    drawn.setdefault("constraint", drawn["align"])
    record = {
        "version": 1, "settings": asdict(settings), "seed": settings.seed, "rule": GROUP_RULE,
        "sources": [dict(source) for source in pools.sources], "skipped": dict(pools.skipped),
        "contradictory_prompts": pools.contradictory,
        "counts": {role: len(drawn[role]) for role in ROLES},
        "groups": {role: len({labels[example.id] for example in drawn[role]}) for role in ROLES},
        "sha256": {role: sha256_lines(sorted(example.id for example in drawn[role])) for role in ROLES},
    }  # fmt: skip
    return Roles(**drawn, record=record)


@PROTOCOLS.register(PAPER)
def paper_roles(settings: Mapping[str, Any]) -> Roles:
    return draw_roles(RoleSettings(**settings))


def _draw(
    role: str, settings: RoleSettings, pools: Pools, labels: Mapping[str, int], owner: Mapping[int, str]
) -> tuple[Example, ...]:
    size, pool = getattr(settings, role), getattr(pools, _POOL.get(role, "safe"))
    order = generator(settings.seed, role).permutation(len(pool))
    free = [pool[place] for place in order if labels[pool[place].id] not in owner]
    if role in _ONE_OF_A_GROUP:
        first = {labels[example.id]: example for example in reversed(free)}
        free = [example for example in free if first[labels[example.id]] is example]
    if len(free) < size:
        lacking = ", ".join(f"{s['name']} {s['split']}" for s in pools.sources if s["partial"])
        part, whole = f"; the data folder holds only part of {lacking}", ", or use the complete data set"
        raise DataError(
            f"role {role}: {size} examples are asked for, {len(free)} are left that share no prompt with the roles "
            f"before it ({', '.join(ROLES[: ROLES.index(role)]) or 'none'}){part if lacking else ''}",
            remedy=f"ask for fewer {role} examples, or for fewer of the roles before it{whole if lacking else ''}",
        )
    return tuple(free[:size])


def evaluation_prompts(
    source: HarmPrompts, n: int, *, seed: int = 42, folder: Path | None = None
) -> tuple[Example, ...]:
    """The evaluation role of `draw_roles` with these settings: it is drawn first, so the others do not change it.

    Only this role is kept apart from what a run trains on. The prompts that another seed, another source or a larger n
    adds may be in the run's poison (harm looks larger) or among those it learned to refuse (harm looks smaller).
    """
    if n < 1:
        raise ConfigError(f"{n} evaluation prompts are asked for; expected at least 1", remedy="for example 700")
    pool = _prompts(_harmful(source, folder))
    if len(pool) < n:
        raise DataError(f"{n} prompts of {source} are asked for, there are {len(pool)}", remedy="ask for fewer")
    return tuple(pool[place] for place in generator(seed, "evaluation").permutation(len(pool))[:n])


def groups(texts: Sequence[str]) -> list[int]:
    """A label for each text: equal for texts that a chain of matches connects.

    Two texts match when one occurs in the other, |A and B| / |A| >= 4/5 on word 3-shingles, as near-duplicates do: a
    certify prompt inside a longer poison prompt would be trained on. So prompts of different groups match in no way,
    and which texts are together does not depend on the order of `texts`.
    """
    plain = [normalise(text) for text in texts]
    unique = sorted(set(plain))
    pairs = np.array(contained(unique, unique, ignore_common=False), dtype=int).reshape(-1, 2)
    graph = coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(len(unique), len(unique)))
    label = dict(zip(unique, connected_components(graph, directed=False)[1].tolist(), strict=True))
    return [label[text] for text in plain]
