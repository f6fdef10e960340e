"""Near-duplicate prompts: exact Jaccard similarity of word 3-shingles; what many prompts have in common does not count.

A shingle is common when it occurs in over 1 % of the different texts, and in over ten of them. The core of a text are
its shingles no word of which lies in a common one. Two texts match when their normalised texts are equal, or when both
have at least five words and, with A and B their sets of shingles,

    |A and B| / |A or B| >= 4/5   over what is not common, or over the cores, if one has a core of three or more;
    |A and B| / |A or B| >= 4/5   over all shingles, if neither has.

So prompts with one long prefix are compared by their tails, and a template whose slots are filled with a few words is
compared as a whole: its variants stay together. Shorter texts have too few shingles for a ratio.

All is a function of the set of texts: symmetric, independent of their order, and near-linear: pairs are looked for
through shingles that are not common, and texts without a core by their set of common shingles (`_whole`).

Leak search: a text occurs in another where |A and B| / |A| >= 4/5, whatever stands around it. A needle of under five
words occurs where the normalised texts are equal or, if it has at least three words, as a run of whole words. Where a
needle's core has three shingles or more, it occurs where 4/5 of its core do, or 4/5 of its shingles that are not common
to many needles: a constant prefix before every needle neither hides a leak nor makes one.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from holdfast.data import shingles
from holdfast.data.shingles import DENOMINATOR, MIN_CORE, MIN_WORDS, NUMERATOR, Numbers, Sets, Shingles, Wanted

MIN_RUN = 3  # words of the shortest text that is looked for inside another
WINDOW = 10_000  # texts that are searched at one time for others
RULE = (
    "2: jaccard >= 4/5 on word 3-shingles; without those of over 1 % (and over 10) of the prompts, where 3 others "
    "share no word with them; exact under 5 words"
)


def clusters(texts: Sequence[str]) -> list[int]:
    """A label for each text: the position of the first text of its group of near-duplicates.

    Groups are the connected parts of the graph of matching pairs, so no two groups share a match.
    """
    places = shingles.by_normalised(texts)
    unique = list(places)
    parts = _Parts(len(unique))
    for one, others in _matching(unique, parts.apart, parts):
        parts.join(one, others)
    labels = [0] * len(texts)
    for text, root in zip(unique, parts.roots(np.arange(len(unique))).tolist(), strict=True):
        for position in places[text]:
            labels[position] = places[unique[root]][0]  # texts come in the order of their first positions
    return labels


def matches(
    texts_a: Sequence[str], texts_b: Sequence[str], *, among: Sequence[str] | None = None
) -> list[tuple[int, int]]:
    """All pairs (position in a, position in b) that match, ascending; `among` all texts whose common shingles count."""
    places_a, places_b = shingles.by_normalised(texts_a), shingles.by_normalised(texts_b)
    unique = list(dict.fromkeys([*places_a, *places_b, *shingles.by_normalised(among or ())]))
    in_a = np.array([text in places_a for text in unique], dtype=np.bool_)
    in_b = np.array([text in places_b for text in unique], dtype=np.bool_)

    def across(one: int, others: Numbers) -> Numbers:
        return np.asarray(others[(in_a[one] & in_b[others]) | (in_b[one] & in_a[others])])

    pairs = {(text, text) for text in places_a.keys() & places_b.keys()}
    for one, others in _matching(unique, across):
        for other in across(one, others).tolist():
            pairs |= {(unique[one], unique[other]), (unique[other], unique[one])}
    return sorted((i, j) for a, b in pairs for i in places_a.get(a, ()) for j in places_b.get(b, ()))


def contained(needles: Sequence[str], haystacks: Sequence[str], *, ignore_common: bool = True) -> list[tuple[int, int]]:
    """All pairs (position in needles, position in haystacks) where the needle occurs in the haystack, ascending.

    Unless `ignore_common`, what many needles have in common counts, too.
    """
    places, texts = shingles.by_normalised(needles), shingles.by_normalised(haystacks)
    found = _search(list(places), list(texts), lambda _: False, ignore_common)
    pairs = {(a, b) for some, others in found for a in some for b in others}
    return sorted((i, j) for a, b in pairs for i in places[a] for j in texts[b])


def occurring(needles: Sequence[str], haystacks: Sequence[str]) -> list[int]:
    """Positions of the needles that occur in any haystack, ascending: `contained` without the pairs, of which a
    template in both makes as many as needles times haystacks.

    Whether a needle occurs depends on the needles and the one haystack alone, so that haystacks are searched in
    windows: the shingles of a million of them take ten times the memory of their texts.
    """
    places = shingles.by_normalised(needles)
    seen: set[str] = set()
    for start in range(0, len(haystacks) if places else 0, WINDOW):
        texts = shingles.by_normalised(haystacks[start : start + WINDOW])
        for some, _ in _search(list(places), list(texts), seen.__contains__, True):
            seen.update(some)
    return sorted(position for text in seen for position in places[text])


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
        return np.asarray(others[self.roots(others) != self.roots(np.array([one]))[0]])

    def join(self, one: int, others: Numbers) -> None:
        roots = self.roots(np.append(others, one))
        self._parent[roots] = roots.min()


def _matching(texts: Sequence[str], wanted: Wanted, parts: _Parts | None = None) -> Iterator[tuple[int, Numbers]]:
    shingled = shingles.shingles_of(texts, limit=shingles.common_limit(len(texts)))
    cored = shingled.core.sizes >= MIN_CORE

    def by_own(one: int, others: Numbers) -> Numbers:
        return wanted(one, others if cored[one] else others[cored[others]])

    for sets in (shingled.own,) if shingled.core is shingled.every else (shingled.own, shingled.core):
        for one, others, _ in shingles.similar(sets, by_own):
            yield one, others
    rest = np.flatnonzero(~cored & (shingled.every.sizes > 0))
    if len(rest):
        yield from _whole(shingled.every, shingled.common, rest, wanted, parts)


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

    for one, others, _ in shingles.similar(sets, of_rest, below=common):
        yield int(rest[one]), rest[others]
    shared = sets.where(sets.values >= common)
    extra = sets.sizes - shared.sizes
    kinds, common_sets = shingles.equal_sets(shared, extra)
    sizes = common_sets.sizes

    def between(one: int, other: int, both: int) -> Iterator[tuple[int, Numbers]]:
        slack = DENOMINATOR * both // NUMERATOR - int(sizes[one] + sizes[other] - both)
        for first, second in _within(kinds[one], kinds[other], extra, slack, parts is not None):
            yield int(rest[first]), rest[second]

    for kind, size in enumerate(sizes.tolist()):
        yield from between(kind, kind, size)
    worth = (lambda _, others: others) if parts is None else _not_connected(parts, [rest[kind] for kind in kinds])
    for one, others, overlap in shingles.similar(common_sets, worth):
        for other, both in zip(others.tolist(), overlap.tolist(), strict=True):
            yield from between(one, other, both)


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
        return np.asarray(others[apart | ~whole[others] | ~whole[one]])

    return worth


def _search(
    needles: list[str], haystacks: list[str], done: Callable[[str], bool], ignore_common: bool
) -> Iterator[tuple[list[str], list[str]]]:
    yield from _short(needles, haystacks)
    texts = list(dict.fromkeys([*needles, *haystacks]))
    places = {text: number for number, text in enumerate(texts)}
    limit = shingles.common_limit(len(needles)) if ignore_common else None
    known = shingles.shingles_of(texts, limit=limit, counted=len(needles))
    every = known.every.rows(np.array([places[text] for text in haystacks], dtype=np.int64))
    cored = known.core.sizes[: len(needles)] >= MIN_CORE
    plain = np.flatnonzero(~cored & (known.every.sizes[: len(needles)] > 0))

    def holding(sets: Sets, rows: Numbers, below: int | None = None) -> Iterator[tuple[list[str], list[str]]]:
        names = [texts[row] for row in rows.tolist()]
        found = shingles.holding(sets.rows(rows), every, done=lambda number: done(names[number]), below=below)
        for one, others, _ in found:
            yield [names[one]], [haystacks[other] for other in others.tolist()]

    yield from holding(known.core, np.flatnonzero(cored))
    yield from holding(known.every, plain, known.common)
    if known.core is not known.every:
        yield from holding(known.own, np.flatnonzero(cored))
    for some, others in _by_common(known, plain, every):
        yield [texts[row] for row in some.tolist()], [haystacks[other] for other in others.tolist()]


def _by_common(known: Shingles, rows: Numbers, every: Sets) -> Iterator[tuple[Numbers, Numbers]]:
    """Needles without a core and the haystacks whose common shingles alone are 4/5 of theirs.

    Needles, and haystacks, with the same common shingles are compared as one.
    """
    needles = known.every.rows(rows)
    sizes = needles.sizes
    mine, theirs = (sets.where(sets.values >= known.common) for sets in (needles, every))
    (some, asked), (others, held) = shingles.equal_sets(mine, sizes), shingles.equal_sets(theirs, theirs.sizes)
    for one, held_by, shared in shingles.holding(asked, held):
        members = some[one]  # from small to large
        for other, both in zip(held_by.tolist(), shared.tolist(), strict=True):
            fits = members[: np.searchsorted(NUMERATOR * sizes[members], DENOMINATOR * both, side="right")]
            yield rows[fits], others[other]


def _short(needles: list[str], haystacks: list[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Needles of under five words: equal texts, and runs of three or four words."""
    split = [(needle, tuple(shingles.words(needle))) for needle in needles]
    equal = {needle for needle, own in split if len(own) < MIN_WORDS}
    runs = {own: needle for needle, own in split if MIN_RUN <= len(own) < MIN_WORDS}
    sizes = {len(own) for own in runs}
    for haystack in haystacks:
        held = {haystack} & equal
        parts = shingles.words(haystack) if sizes else []
        for size in sizes:
            held |= {runs[run] for run in zip(*(parts[i:] for i in range(size)), strict=False) if run in runs}
        if held:
            yield list(held), [haystack]
