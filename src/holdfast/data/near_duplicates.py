"""Near-duplicate prompts: exact Jaccard similarity of word 3-shingles; what many prompts have in common does not count.

A shingle is common when it occurs in over 1 % of the different texts, and in over ten of them. The core of a text are
its shingles no word of which lies in a common one. Two texts match when their normalised texts are equal, or when both
have at least five words and, with A and B their sets of shingles,

    |A and B| / |A or B| >= 4/5   over what is not common, or over the cores, if one has a core of three or more;
    |A and B| / |A or B| >= 4/5   over all shingles, if neither has.

So prompts with one long prefix and unlike tails of five words or more are compared by their tails, and a template whose
slots are filled with a few words is compared as a whole: its variants stay together however many there are. Texts of
under five words have too few shingles for a ratio, so that questions such as "How do I ... ?" do not merge.

All is a function of the set of texts: symmetric, and independent of their order. The work is near-linear: pairs are
looked for through shingles that are not common, and texts without a core by their set of common shingles (`_whole`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from holdfast.data.shingles import (
    MIN_CORE,
    MIN_WORDS,
    Numbers,
    Sets,
    by_normalised,
    common_limit,
    shingles_of,
)
from holdfast.data.similar_sets import DENOMINATOR, NUMERATOR, Wanted, equal_sets, similar

RULE = (
    "2: jaccard >= 4/5 on word 3-shingles; without those of over 1 % (and over 10) of the prompts, where 3 others "
    "share no word with them; exact under 5 words"
)


def clusters(texts: Sequence[str]) -> list[int]:
    """A label for each text: the position of the first text of its group of near-duplicates.

    Groups are the connected parts of the graph of matching pairs, so no two groups share a match.
    """
    places = by_normalised(texts)
    unique = list(places)
    parts = _Parts(len(unique))
    for one, others in _matching(unique, parts.apart, common_limit(len(unique)), parts):
        parts.join(one, others)
    labels = [0] * len(texts)
    first: dict[int, int] = {}
    for text, root in zip(unique, parts.roots(np.arange(len(unique))).tolist(), strict=True):
        label = first.setdefault(root, places[text][0])  # texts come in the order of their first positions
        for position in places[text]:
            labels[position] = label
    return labels


def matches(
    texts_a: Sequence[str], texts_b: Sequence[str], *, among: Sequence[str] | None = None
) -> list[tuple[int, int]]:
    """All pairs (position in a, position in b) that match, ascending.

    Args:
        among: the texts that decide which shingles are common, where a and b are a part of them.
    """
    places_a, places_b = by_normalised(texts_a), by_normalised(texts_b)
    unique = list(dict.fromkeys([*places_a, *places_b, *by_normalised(among or ())]))
    in_a = np.array([text in places_a for text in unique], dtype=np.bool_)
    in_b = np.array([text in places_b for text in unique], dtype=np.bool_)

    def across(one: int, others: Numbers) -> Numbers:
        wanted: Numbers = others[(in_a[one] & in_b[others]) | (in_b[one] & in_a[others])]
        return wanted

    pairs = {(text, text) for text in places_a if text in places_b}
    for one, others in _matching(unique, across, common_limit(len(unique))):
        for other in across(one, others).tolist():
            pairs.update(((unique[one], unique[other]), (unique[other], unique[one])))
    return sorted((i, j) for a, b in pairs for i in places_a.get(a, ()) for j in places_b.get(b, ()))


def repeats(texts: Sequence[str]) -> set[int]:
    """Positions of the texts that match an earlier one, with every shingle counted.

    For a sequence: which shingles are common would change as it grows, and with it what was decided before.
    """
    places = by_normalised(texts)
    unique = list(places)
    found = {position for positions in places.values() for position in positions[1:]}

    def undecided(one: int, others: Numbers) -> Numbers:
        later = np.maximum(one, others)
        return others[[number not in dropped for number in later.tolist()]]

    dropped: set[int] = set()
    for one, others in _matching(unique, undecided, None):
        dropped.update(np.maximum(one, others).tolist())
    return found | {places[unique[number]][0] for number in dropped}


class _Parts:
    """Connected parts of a graph that is still being built."""

    def __init__(self, nodes: int) -> None:
        self._parent = np.arange(nodes)

    def roots(self, nodes: Numbers) -> Numbers:
        """Of each node: the smallest node of its part."""
        found = self._parent[nodes]
        while True:
            above = self._parent[found]
            if np.array_equal(above, found):
                self._parent[nodes] = found
                return found
            found = above

    def apart(self, one: int, others: Numbers) -> Numbers:
        """Those of the others that are not known to be connected with this one."""
        wanted: Numbers = others[self.roots(others) != self.roots(np.array([one]))[0]]
        return wanted

    def join(self, one: int, others: Numbers) -> None:
        """Connect a node with others."""
        roots = self.roots(np.append(others, one))
        self._parent[roots] = roots.min()


def _matching(
    texts: Sequence[str], wanted: Wanted, limit: int | None, parts: _Parts | None = None
) -> Iterator[tuple[int, Numbers]]:
    """Each text with others that match it; with `parts`, no more than connect what matches."""
    found = shingles_of(texts, limit=limit)
    cored = (found.core.sizes >= MIN_CORE) & (found.words >= MIN_WORDS)

    def by_own(one: int, others: Numbers) -> Numbers:
        return wanted(one, others if cored[one] else others[cored[others]])

    for sets in (found.own,) if found.core is found.every else (found.own, found.core):
        for one, others, _ in similar(sets, by_own):
            yield one, others
    rest = np.flatnonzero(~cored & (found.words >= MIN_WORDS))
    if len(rest):
        yield from _whole(found.every, found.common, rest, wanted, parts)


def _whole(
    every: Sets, common: int, rest: Numbers, wanted: Wanted, parts: _Parts | None
) -> Iterator[tuple[int, Numbers]]:
    """Matches among texts without a core, over all their shingles.

    Either they share a shingle that is not common, which leads from one to the other. Or they share only common ones:
    then these are similar on their own, and texts with the same common shingles are compared as one. With x shared
    ones of c and d, and a and b that are not common, they match if and only if a + b <= 5/4 x - (c + d - x).
    """
    sets = every.rows(rest)

    def of_rest(one: int, others: Numbers) -> Numbers:
        chosen = wanted(int(rest[one]), rest[others])
        return others[np.isin(rest[others], chosen, assume_unique=True)]

    for one, others, _ in similar(sets, of_rest, below=common):
        yield int(rest[one]), rest[others]
    shared = sets.where(sets.values >= common)
    extra = sets.sizes - shared.sizes
    kinds = equal_sets(shared, extra)
    common_sets = shared.rows(np.array([kind[0] for kind in kinds]))
    sizes = common_sets.sizes
    for kind, size in zip(kinds, sizes.tolist(), strict=True):
        for one, others in _within(kind, kind, extra, _slack(size, size, size), parts is not None):
            yield int(rest[one]), rest[others]

    worth = (lambda _, others: others) if parts is None else _not_connected(parts, [rest[kind] for kind in kinds])
    for one, others, overlap in similar(common_sets, worth):
        for other, both in zip(others.tolist(), overlap.tolist(), strict=True):
            slack = _slack(both, int(sizes[one]), int(sizes[other]))
            for first, second in _within(kinds[one], kinds[other], extra, slack, parts is not None):
                yield int(rest[first]), rest[second]


def _slack(both: int, first: int, second: int) -> int:
    """The most shingles that two texts may have besides their common ones and still match."""
    return DENOMINATOR * both // NUMERATOR - (first + second - both)


def _within(
    first: Numbers, second: Numbers, extra: Numbers, slack: int, connect: bool
) -> Iterator[tuple[int, Numbers]]:
    """Pairs of one kind and another whose extra shingles are at most `slack` together; both kinds come by `extra`.

    To connect them, the first of each kind is enough: it matches whatever any other of its kind matches.
    """
    sides = [(first[0], second), (second[0], first)] if connect else [(one, second) for one in first]
    for one, others in sides:
        fits = others[: np.searchsorted(extra[others], slack - extra[one], side="right")]
        fits = fits[fits != one]
        if len(fits):
            yield int(one), fits


def _not_connected(parts: _Parts, kinds: Sequence[Numbers]) -> Wanted:
    """Picks kinds that are not known to lie in the same part as another, each of the two whole."""
    heads = np.array([kind[0] for kind in kinds])
    sizes = np.array([len(kind) for kind in kinds])
    same = parts.roots(np.concatenate(kinds)) == np.repeat(parts.roots(heads), sizes)
    whole = np.minimum.reduceat(same, np.cumsum(sizes) - sizes)  # what is one part stays one

    def worth(one: int, others: Numbers) -> Numbers:
        apart = parts.roots(heads[others]) != parts.roots(heads[one : one + 1])[0]
        wanted: Numbers = others[apart | ~whole[others] | ~whole[one]]
        return wanted

    return worth
