"""The three roles of the safety set, split once and by prompt.

`constraint` steers training, `monitor` is looked at during training, `certify` is opened once at the end.
Whole clusters of near-duplicate prompts go to one role: otherwise memorised prompts would count as held-out.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations

import numpy as np

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.seeding import generator
from holdfast.data.examples import Example, completion_text, normalise, prompt_text
from holdfast.data.near_duplicates import RULE, clusters, matches, occurring
from holdfast.data.split_record import ROLES, VERSION, SplitRecord

MAX_LISTED = 20
Fractions = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Split:
    """The examples of each role, sorted by id, and the record of how they got there."""

    constraint: tuple[Example, ...]
    monitor: tuple[Example, ...]
    certify: tuple[Example, ...]
    record: SplitRecord

    @property
    def roles(self) -> dict[str, tuple[Example, ...]]:
        return {"constraint": self.constraint, "monitor": self.monitor, "certify": self.certify}


def split_examples(examples: Sequence[Example], *, seed: int, fractions: Fractions = (0.6, 0.2, 0.2)) -> Split:
    """Split into constraint, monitor and certify; depends on the examples and the seed alone, not on row order.

    Sizes hit the fractions where single prompts can fill the gaps, and else miss by under twice the largest cluster.
    """
    fine = all(math.isfinite(fraction) and fraction >= 0 for fraction in fractions)
    if not (fine and fractions[0] > 0 and abs(sum(fractions) - 1) < 1e-9):
        what = f"split fractions are {fractions}; expected three numbers >= 0 that sum to 1, the first above 0"
        raise ConfigError(what, remedy="for example 0.6, 0.2, 0.2")
    unique = _deduplicate(examples)
    labels = clusters(_prompts(unique))
    members: dict[int, list[Example]] = defaultdict(list)
    for label, example in zip(labels, unique, strict=True):
        members[label].append(example)
    used = sum(fraction > 0 for fraction in fractions)
    if len(members) < used:
        raise DataError(
            f"safety set too small: {len(members)} distinct prompts in {len(examples)} rows; needed: "
            f"at least {used}, 1 for each of {used} roles",
            remedy="add safety examples with other prompts, or set the monitor or certify fraction to 0",
        )
    chosen = _assign(list(members.values()), _target_sizes(len(unique), fractions), seed)
    return _build(chosen, len(examples) - len(unique), seed, fractions)


def _target_sizes(n: int, fractions: Fractions) -> list[int]:
    """Whole sizes nearest to n * fraction (largest remainder), none of a used role 0."""
    exact = [n * fraction for fraction in fractions]
    sizes = [math.floor(value + 1e-9) for value in exact]
    for role in sorted(range(3), key=lambda role: sizes[role] - exact[role])[: n - sum(sizes)]:
        sizes[role] += 1
    for role, fraction in enumerate(fractions):
        if fraction > 0 and sizes[role] < 1:
            sizes[sizes.index(max(sizes))] -= 1
            sizes[role] += 1
    return sizes


def _assign(groups: Sequence[Sequence[Example]], targets: Sequence[int], seed: int) -> list[list[Example]]:
    """Give each cluster to one of three roles at random, in proportion to the room that is left in it.

    Large clusters go first, so that small ones can fill the gaps; the draw keeps them from all landing in the largest
    role, which would make the roles differ in kind. Every role with a target gets a member.
    """
    rng = generator(seed, "split")
    ordered = sorted((groups[number] for number in rng.permutation(len(groups))), key=len, reverse=True)
    chosen: list[list[Example]] = [[], [], []]
    for done, group in enumerate(ordered):
        sizes = np.array(list(map(len, chosen)))
        room, lacking = np.array(targets) - sizes, (np.array(targets) > 0) & (sizes == 0)
        if len(ordered) - done <= lacking.sum():  # every cluster left is needed for a role without any
            role = int(lacking.argmax())
        elif (room >= len(group)).any():
            weight = np.where(room >= len(group), room, 0)
            role = int(rng.choice(3, p=weight / weight.sum()))
        else:
            role = int(room.argmax())
        chosen[role].extend(group)
    return chosen


def _deduplicate(examples: Sequence[Example]) -> list[Example]:
    first = {example.id: example for example in reversed(examples)}
    return [first[key] for key in sorted(first)]


def _build(
    chosen: Sequence[Sequence[Example]], duplicates: int, seed: int | None, fractions: Fractions | None
) -> Split:
    completions: dict[str, set[str]] = defaultdict(set)
    for example in (example for members in chosen for example in members):
        completions[normalise(prompt_text(example))].add(completion_text(example))
    contradictory = sum(len(different) > 1 for different in completions.values())
    blank = SplitRecord(
        VERSION, seed, fractions, RULE, counts={}, clusters={}, n_clusters=0, duplicates_dropped=duplicates,
        contradictory_prompts=contradictory, moved_from_certify=0, sha256={}, ids={},
    )  # fmt: skip
    return _with_members(blank, chosen)


def _with_members(record: SplitRecord, chosen: Sequence[Sequence[Example]]) -> Split:
    ordered = (tuple(sorted(members, key=lambda example: example.id)) for members in chosen)
    roles = dict(zip(ROLES, ordered, strict=True))
    ids = {role: [e.id for e in members] for role, members in roles.items()}
    sizes = {role: len(set(clusters(_prompts(members)))) for role, members in roles.items()}
    return Split(**roles, record=record.with_roles(ids, sizes))


def _prompts(examples: Sequence[Example]) -> list[str]:
    return [prompt_text(example) for example in examples]


def split_from_roles(
    constraint: Sequence[Example], monitor: Sequence[Example] = (), certify: Sequence[Example] = ()
) -> Split:
    """A split that the user made, checked to be disjoint; equal rows inside a role count once."""
    if not constraint:
        raise DataError("the constraint role has no examples", remedy="give at least one safety example")
    given = (constraint, monitor, certify)
    chosen = [_deduplicate(members) for members in given]
    split = _build(chosen, sum(map(len, given)) - sum(map(len, chosen)), None, None)
    require_disjoint(split)
    return split


def require_disjoint(split: Split) -> None:
    """Prove that no two roles share a prompt, exact after normalisation or nearly."""
    found, counts = list[str](), list[str]()
    every = [text for members in split.roles.values() for text in _prompts(members)]
    for (first, a), (second, b) in combinations(split.roles.items(), 2):
        if pairs := matches(_prompts(a), _prompts(b), among=every):
            same = sum(normalise(prompt_text(a[i])) == normalise(prompt_text(b[j])) for i, j in pairs)
            counts.append(f"{first} and {second}: {same} equal and {len(pairs) - same} nearly equal pairs")
            found.extend(f"{_place(a[i])} = {_place(b[j])}" for i, j in pairs)
    if found:
        remedy = "give one safety file and let it be split, or remove the shared prompts from one role"
        raise DataError(f"the safety roles share prompts: {'; '.join(counts)}; at {_listed(found)}", remedy=remedy)


def _place(example: Example) -> str:
    """Where the example is to be found, with its id behind; never its text."""
    return f"{example.where} ({example.id})"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_LISTED]) + (", ..." if len(names) > MAX_LISTED else "")


def require_apart(splits: Mapping[str, Split]) -> None:
    """Prove that no safety set steers by a prompt that another one watches or certifies on."""
    for (first, a), (second, b) in permutations(splits.items(), 2):
        for role, examples in (("monitor", a.monitor), ("certify", a.certify)):
            pairs = matches(_prompts(examples), _prompts(b.constraint))
            if shared := [_place(examples[i]) for i in sorted({i for i, _ in pairs})]:
                what = f"{len(shared)} {role} prompts of safety set {first!r} are constraint prompts of {second!r}"
                remedy = "keep each of these prompts in one of the two sets"
                raise DataError(f"{what}, exactly or nearly: at {_listed(shared)}", remedy=remedy)


def require_unseen(certify: Sequence[Example], task_texts: Sequence[str]) -> None:
    """Prove that no certify prompt is in the task's `searchable_texts`, exactly or nearly, alone or in a longer one."""
    # A near-duplicate occurs too: |A and B| / |A| is at least |A and B| / |A or B|.
    if leaking := occurring(_prompts(certify), task_texts):
        what = f"{len(leaking)} of {len(certify)} certify prompts occur in the task data, exactly or nearly"
        remedy = "set safety.on_leak: move to use them for the constraint instead, or remove them"
        raise DataError(f"{what}: at {_listed([_place(certify[i]) for i in leaking])}", remedy=remedy)


def move_leaks(split: Split, task_texts: Sequence[str]) -> Split:
    """Move certify clusters that the task data's `searchable_texts` touch to the constraint, never the other way."""
    if not (leaking := occurring(_prompts(split.certify), task_texts)):
        return split
    labels = clusters(_prompts(split.certify))
    touched = {labels[i] for i in leaking}
    moved = [e for e, label in zip(split.certify, labels, strict=True) if label in touched]
    if not (kept := [e for e, label in zip(split.certify, labels, strict=True) if label not in touched]):
        what = f"all {len(moved)} certify prompts occur in the task data; none would be left to certify on"
        raise DataError(what, remedy="add safety examples whose prompts are not in the task data")
    record = replace(split.record, moved_from_certify=split.record.moved_from_certify + len(moved))
    return _with_members(record, [[*split.constraint, *moved], split.monitor, kept])
