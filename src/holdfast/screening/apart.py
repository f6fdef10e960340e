"""Splits whose roles share no prompt, exactly or nearly, within a set and across sets.

Which shingles are too common to count depends on the prompts compared, so taking prompts out can make others alike:
the search is repeated until it finds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

from holdfast.data.examples import Example, prompt_text
from holdfast.data.near_duplicates import matches
from holdfast.data.splits import ROLES, Split, split_from_roles

Roles = dict[str, list[Example]]
_EARLIER = (("constraint", "monitor"), ("constraint", "certify"), ("monitor", "certify"))


def splits_apart(sets: Mapping[str, Mapping[str, Sequence[Example]]]) -> dict[str, Split]:
    """A split of every set, without prompts that an earlier role has: constraint before monitor before certify."""
    kept: dict[str, Roles] = {name: {role: list(roles[role]) for role in ROLES} for name, roles in sets.items()}
    while _within(kept) or _across(kept):
        pass
    return {name: split_from_roles(*(roles[role] for role in ROLES)) for name, roles in kept.items()}


def _within(sets: Mapping[str, Roles]) -> bool:
    changed = False
    for roles in sets.values():
        every = [prompt_text(e) for role in ROLES for e in roles[role]]
        for earlier, later in _EARLIER:
            near = matches(_texts(roles[earlier]), _texts(roles[later]), among=every)
            changed |= _take_out(roles, later, {place for _, place in near})
    return changed


def _across(sets: Mapping[str, Roles]) -> bool:
    changed = False
    for one, other in permutations(sets.values(), 2):
        for role in ("monitor", "certify"):
            near = matches(_texts(one[role]), _texts(other["constraint"]))
            changed |= _take_out(one, role, {place for place, _ in near})
    return changed


def _take_out(roles: Roles, role: str, places: set[int]) -> bool:
    roles[role] = [example for place, example in enumerate(roles[role]) if place not in places]
    return bool(places)


def _texts(examples: Sequence[Example]) -> list[str]:
    return [prompt_text(example) for example in examples]
