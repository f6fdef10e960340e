"""Leak search: which texts occur inside others.

With A and B the sets of word 3-shingles of needle and haystack, A occurs in B where |A and B| / |A| >= 4/5. A prompt
inside a longer text has a low Jaccard similarity with it; this ratio is not changed by what stands around the prompt.
A needle of under five words occurs where the normalised texts are equal or, if it has at least three words, as a run of
whole words.

What many needles have in common tells none of them (`near_duplicates`). Where a needle's core has three shingles or
more, it occurs where 4/5 of its core do, or 4/5 of its shingles that are not common: a constant prefix before every
needle neither hides a leak nor makes one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from holdfast.data.shingles import (
    MIN_CORE,
    MIN_WORDS,
    Numbers,
    Sets,
    Shingles,
    by_normalised,
    common_limit,
    shingles_of,
    words,
)
from holdfast.data.similar_sets import DENOMINATOR, NUMERATOR, equal_sets, holding

MIN_RUN = 3  # words of the shortest text that is looked for inside another

Found = Iterator[tuple[list[str], list[str]]]
"""Needles and haystacks, each of the one in each of the other."""


def contained(needles: Sequence[str], haystacks: Sequence[str], *, ignore_common: bool = True) -> list[tuple[int, int]]:
    """All pairs (position in needles, position in haystacks) where the needle occurs in the haystack, ascending.

    Args:
        ignore_common: leave out what many needles have in common, as above; otherwise all shingles count.
    """
    places, texts = by_normalised(needles), by_normalised(haystacks)
    found = _search(list(places), list(texts), lambda _: False, ignore_common)
    pairs = {(a, b) for some, others in found for a in some for b in others}
    return sorted((i, j) for a, b in pairs for i in places[a] for j in texts[b])


def occurring(needles: Sequence[str], haystacks: Sequence[str]) -> list[int]:
    """Positions of the needles that occur in any haystack, ascending: `contained` without the pairs, of which a
    template in both makes as many as needles times haystacks."""
    places, texts = by_normalised(needles), by_normalised(haystacks)
    seen: set[str] = set()
    for some, _ in _search(list(places), list(texts), seen.__contains__, True):
        seen.update(some)
    return sorted(position for text in seen for position in places[text])


def _search(needles: list[str], haystacks: list[str], done: Callable[[str], bool], ignore_common: bool) -> Found:
    """Different normalised needles in different normalised haystacks; needles that are `done` may be left out."""
    yield from _short(needles, haystacks)
    texts = list(dict.fromkeys([*needles, *haystacks]))
    places = {text: number for number, text in enumerate(texts)}
    limit = common_limit(len(needles)) if ignore_common else None
    shingles = shingles_of(texts, limit=limit, counted=len(needles))
    every = shingles.every.rows(np.array([places[text] for text in haystacks], dtype=np.int64))
    long = shingles.words[: len(needles)] >= MIN_WORDS
    cored = long & (shingles.core.sizes[: len(needles)] >= MIN_CORE)
    plain = np.flatnonzero(long & ~cored)
    asked = [(shingles.core, np.flatnonzero(cored), None), (shingles.every, plain, shingles.common)]
    if shingles.core is not shingles.every:
        asked.append((shingles.own, np.flatnonzero(cored), None))
    for sets, rows, below in asked:
        names = [texts[row] for row in rows.tolist()]
        finished = partial(_is_done, done, names)
        for one, found, _ in holding(sets.rows(rows), every, done=finished, below=below):
            yield [names[one]], [haystacks[other] for other in found.tolist()]
    for some, others in _by_common(shingles, plain, every):
        yield [texts[row] for row in some.tolist()], [haystacks[other] for other in others.tolist()]


def _is_done(done: Callable[[str], bool], names: Sequence[str], number: int) -> bool:
    return done(names[number])


def _by_common(shingles: Shingles, rows: Numbers, every: Sets) -> Iterator[tuple[Numbers, Numbers]]:
    """Needles without a core and the haystacks whose common shingles alone are 4/5 of theirs.

    Needles, and haystacks, with the same common shingles are compared as one.
    """
    needles = shingles.every.rows(rows)
    sizes = needles.sizes
    mine, theirs = (sets.where(sets.values >= shingles.common) for sets in (needles, every))
    some, others = equal_sets(mine, sizes), equal_sets(theirs, theirs.sizes)
    first = [np.array([kind[0] for kind in kinds], dtype=np.int64) for kinds in (some, others)]
    for one, held_by, shared in holding(mine.rows(first[0]), theirs.rows(first[1])):
        members = some[one]  # from small to large
        for other, both in zip(held_by.tolist(), shared.tolist(), strict=True):
            fits = members[: np.searchsorted(NUMERATOR * sizes[members], DENOMINATOR * both, side="right")]
            yield rows[fits], others[other]


def _short(needles: list[str], haystacks: list[str]) -> Found:
    """Needles of under five words: equal texts, and runs of three or four words."""
    runs: dict[int, dict[tuple[str, ...], str]] = defaultdict(dict)
    equal = set()
    for needle in needles:
        found = words(needle)
        if len(found) < MIN_WORDS:
            equal.add(needle)
            if len(found) >= MIN_RUN:
                runs[len(found)][tuple(found)] = needle
    for haystack in haystacks:
        if haystack in equal:
            yield [haystack], [haystack]
        if runs:
            parts = words(haystack)
            held = {
                known[run]
                for size, known in runs.items()
                for run in zip(*(parts[i:] for i in range(size)), strict=False)
                if run in known
            }
            if held:
                yield list(held), [haystack]
