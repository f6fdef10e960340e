"""Which cluster goes to which role: sizes near the fractions, clusters whole, the draw random but seeded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from holdfast.core.seeding import generator

T = TypeVar("T")


def target_sizes(n: int, fractions: tuple[float, float, float], minimum: int) -> list[int]:
    """Whole sizes nearest to n * fraction (largest remainder), none of a used role under `minimum`."""
    exact = [n * fraction for fraction in fractions]
    sizes = [math.floor(value + 1e-9) for value in exact]
    for role in sorted(range(3), key=lambda role: sizes[role] - exact[role])[: n - sum(sizes)]:
        sizes[role] += 1
    for role, fraction in enumerate(fractions):
        while fraction > 0 and sizes[role] < minimum:
            sizes[sizes.index(max(sizes))] -= 1
            sizes[role] += 1
    return sizes


def assign(groups: Sequence[Sequence[T]], targets: Sequence[int], seed: int, minimum: int) -> list[list[T]]:
    """Give each cluster to one of three roles at random, in proportion to the room that is left in it.

    Large clusters go first, so that small ones can fill the gaps; the draw keeps them from all landing in
    the largest role, which would make the roles differ in kind. Every role with a target gets `minimum`
    members when there are that many clusters for each.
    """
    rng = generator(seed, "split")
    order = rng.permutation(len(groups))
    ordered = sorted((groups[number] for number in order), key=len, reverse=True)
    chosen: list[list[T]] = [[], [], []]
    for done, group in enumerate(ordered):
        room = np.array([target - len(role) for target, role in zip(targets, chosen, strict=True)])
        lacking = np.array([max(0, minimum - len(c)) if t else 0 for t, c in zip(targets, chosen, strict=True)])
        if len(ordered) - done <= lacking.sum():  # every cluster left is needed for a minimum
            role = int(lacking.argmax())
        elif (room >= len(group)).any():
            weight = np.where(room >= len(group), room, 0)
            role = int(rng.choice(3, p=weight / weight.sum()))
        else:
            role = int(room.argmax())
        chosen[role].extend(group)
    return chosen
