"""Which of many sets are similar: |A and B| / |A or B| >= 4/5, exactly, by prefix filtering.

Values are numbered from rare to frequent. If A and B are similar, |A| >= |B|, then their rarest shared value is among
the first |A| - ceil(4/5 |A|) + 1 of A and the first |B| - ceil(8/9 |B|) + 1 of B, since they share at least
4/9 (|A| + |B|) values; where it stands bounds how many they can share. Only what passes is compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np

from holdfast.data.shingles import Flags, Numbers, Sets, distinct

NUMERATOR, DENOMINATOR = 4, 5

Wanted = Callable[[int, Numbers], Numbers]
"""Of a set and others: those others that are worth comparing with it."""


def enough(shared: Numbers, first: int, second: Numbers) -> Flags:
    """Whether |A and B| / |A or B| >= 4/5, in integers."""
    return DENOMINATOR * shared >= NUMERATOR * (first + second - shared)


def overlaps(mine: Numbers, sets: Sets, others: Numbers) -> Numbers:
    """How many values a set shares with each of the others."""
    theirs = sets.rows(others)
    place = np.searchsorted(mine, theirs.values)
    place[place == len(mine)] = 0
    hits = np.concatenate([[0], np.cumsum(mine[place] == theirs.values)])
    found: Numbers = hits[theirs.starts[1:]] - hits[theirs.starts[:-1]]
    return found


def equal_sets(sets: Sets, order: Numbers) -> list[Numbers]:
    """The numbers of the sets that are equal, together; from small to large in `order`."""
    kinds: dict[bytes, list[int]] = defaultdict(list)
    for number in np.argsort(order, kind="stable").tolist():
        kinds[sets.row(number).tobytes()].append(number)
    return [np.array(numbers) for numbers in kinds.values()]


def similar(sets: Sets, wanted: Wanted, *, below: int | None = None) -> Iterator[tuple[int, Numbers, Numbers]]:
    """Sets with others that are similar to them, and how much they share; every pair comes once.

    Args:
        wanted: which of the candidates to compare.
        below: only pairs that share a value under this one.
    """
    sizes = sets.sizes
    for one, others in _candidates(sets, sizes, below):
        chosen = wanted(one, others)
        if len(chosen):
            shared = overlaps(sets.row(one), sets, chosen)
            fits = enough(shared, int(sizes[one]), sizes[chosen])
            if fits.any():
                yield one, chosen[fits], shared[fits]


def _candidates(sets: Sets, sizes: Numbers, below: int | None) -> Iterator[tuple[int, Numbers]]:
    """Each set with those before it, in order of size, that may be similar."""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    position = np.arange(len(sets.values)) - sets.starts[owner]
    kept = position <= sizes[owner] - _ceil(NUMERATOR * sizes, DENOMINATOR)[owner]
    if below is not None:
        kept &= sets.values < below
    value, owner, position = sets.values[kept], owner[kept], position[kept]
    repeated = np.bincount(value)[value] > 1 if len(value) else np.zeros(0, dtype=np.bool_)
    value, owner, position = value[repeated], owner[repeated], position[repeated]
    turn = np.empty(len(sizes), dtype=np.int64)
    turn[np.argsort(sizes, kind="stable")] = np.arange(len(sizes))
    order = np.lexsort((turn[owner], value))
    value, owner, position = value[order], owner[order], position[order]
    # As the smaller of two sets, one must share at least 8/9 of its own values.
    listed = position <= sizes[owner] - _ceil(2 * NUMERATOR * sizes, NUMERATOR + DENOMINATOR)[owner]
    before = np.concatenate([[0], np.cumsum(listed)])
    first = np.searchsorted(value, value)
    low, high = before[first], before[:-1]
    owner_listed, position_listed = owner[listed], position[listed]
    asks = np.flatnonzero(low < high)
    asks = asks[np.argsort(turn[owner[asks]], kind="stable")]
    bounds = np.flatnonzero(np.diff(owner[asks], prepend=-1, append=-1))
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        one = int(owner[asks[start]])
        size = int(sizes[one])
        found = []
        for ask in asks[start:end].tolist():
            others = owner_listed[low[ask] : high[ask]]
            left = np.minimum(size - position[ask], sizes[others] - position_listed[low[ask] : high[ask]])
            fits = enough(left, size, sizes[others])
            found.append(others[fits])
        yield one, found[0] if len(found) == 1 else distinct(np.concatenate(found))


def holding(
    needles: Sets, haystacks: Sets, *, done: Callable[[int], bool] | None = None, below: int | None = None
) -> Iterator[tuple[int, Numbers, Numbers]]:
    """Sets A with the sets B that hold |A and B| / |A| >= 4/5 of them, and how much that is.

    What holds 4/5 of A holds one of its |A| - ceil(4/5 |A|) + 1 rarest values, and is looked for through these.

    Args:
        done: which needles need not be looked for any more.
        below: only through values under this one.
    """
    sizes = needles.sizes
    order = np.argsort(haystacks.values, kind="stable")
    value = haystacks.values[order]
    owner = np.repeat(np.arange(len(haystacks.starts) - 1), haystacks.sizes)[order]
    for one in range(len(sizes)):
        rarest = needles.row(one)[: sizes[one] - _ceil(NUMERATOR * sizes[one : one + 1], DENOMINATOR)[0] + 1]
        rarest = rarest if below is None else rarest[rarest < below]
        low, high = np.searchsorted(value, rarest), np.searchsorted(value, rarest, side="right")
        found = [owner[a:b] for a, b in zip(low.tolist(), high.tolist(), strict=True) if a < b]
        if not found or (done is not None and done(one)):
            continue
        others = distinct(np.concatenate(found))
        shared = overlaps(needles.row(one), haystacks, others)
        fits = DENOMINATOR * shared >= NUMERATOR * sizes[one]
        if fits.any():
            yield one, others[fits], shared[fits]


def _ceil(numerator: Numbers, denominator: int) -> Numbers:
    return -(-numerator // denominator)
