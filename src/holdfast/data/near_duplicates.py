"""Near-duplicate prompts: exact Jaccard similarity of word 3-shingles, found through an inverted index.

Two prompts match when their normalised texts are equal, or when both have at least five words and
|A and B| / |A or B| >= 0.8 for their sets of word 3-shingles. Shorter prompts have too few shingles for
the ratio to mean anything, so templates such as "How do I ... ?" do not merge.

Prefix filtering keeps this exact: order all shingles from rare to frequent; if the similarity of A and B is
at least t, the first |A| - ceil(t |A|) + 1 shingles of A and the like of B share one. Only those are indexed.

A prompt inside a longer text has a low Jaccard similarity with it; `contained` asks for |A and B| / |A| instead.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from holdfast.data.examples import normalise

RULE = "jaccard >= 4/5 on word 3-shingles; exact under 5 words"
NUMERATOR, DENOMINATOR = 4, 5
WIDTH = 3
MIN_WORDS = 5
MIN_RUN = 3  # words of the shortest text that is looked for inside another

Shingle: TypeAlias = tuple[str, ...]

# Scripts written without spaces (Thai, Lao, Burmese, Khmer, kana, Han): every character counts as a word.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(f"[{_UNSPACED}]|[^\\s{_UNSPACED}]+")


def shingles(normalised: str) -> frozenset[Shingle]:
    """The word 3-shingles of a normalised text; one shingle, the whole text, when it has under five words."""
    words = _WORD.findall(normalised)
    if len(words) < MIN_WORDS:
        return frozenset([("", normalised)])  # two entries, so it equals no 3-shingle
    return frozenset(_windows(words, WIDTH))


def _windows(words: Sequence[str], width: int) -> Iterator[Shingle]:
    """All runs of `width` words."""
    return zip(*(words[i:] for i in range(width)), strict=False)


def similar(first: frozenset[Shingle], second: frozenset[Shingle]) -> bool:
    """Whether |A and B| / |A or B| >= 4/5, in integers."""
    shared = len(first & second)
    return DENOMINATOR * shared >= NUMERATOR * (len(first) + len(second) - shared)


def _rarest(one: frozenset[Shingle], rank: Mapping[Shingle, int]) -> list[Shingle]:
    """So many of the rarest shingles that whatever holds 4/5 of all of them holds one of these."""
    needed = -(-NUMERATOR * len(one) // DENOMINATOR)  # ceil
    return sorted(one, key=rank.__getitem__)[: len(one) - needed + 1]


class _Index:
    """Sets by their rarest shingles."""

    def __init__(self, sets: Iterable[frozenset[Shingle]]) -> None:
        counts = Counter(shingle for one in sets for shingle in one)
        rarest_first = sorted(counts, key=lambda shingle: (counts[shingle], shingle))
        self._rank = {shingle: rank for rank, shingle in enumerate(rarest_first)}
        self._places: dict[Shingle, list[int]] = defaultdict(list)
        self._sets: dict[int, frozenset[Shingle]] = {}

    def _prefix(self, one: frozenset[Shingle]) -> list[Shingle]:
        return _rarest(one, self._rank)

    def add(self, number: int, one: frozenset[Shingle]) -> None:
        """Enter a set under `number`."""
        self._sets[number] = one
        for shingle in self._prefix(one):
            self._places[shingle].append(number)

    def query(self, one: frozenset[Shingle]) -> list[int]:
        """Numbers of all entered sets similar to `one`, ascending."""
        candidates = {number for shingle in self._prefix(one) for number in self._places.get(shingle, ())}
        return sorted(number for number in candidates if similar(one, self._sets[number]))


def _by_normalised(texts: Sequence[str]) -> dict[str, list[int]]:
    """Normalised text to the positions that have it."""
    places: dict[str, list[int]] = defaultdict(list)
    for position, text in enumerate(texts):
        places[normalise(text)].append(position)
    return places


def clusters(texts: Sequence[str]) -> list[int]:
    """A label for each text: the position of the first text of its cluster.

    Clusters are the connected parts of the graph of matching pairs, so no two clusters share a match.
    """
    places = _by_normalised(texts)
    unique = list(places)
    sets = [shingles(text) for text in unique]
    parent = list(range(len(unique)))

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    index = _Index(sets)
    for number, one in enumerate(sets):
        for other in index.query(one):
            a, b = sorted((root(number), root(other)))
            parent[b] = a
        index.add(number, one)
    labels = [0] * len(texts)
    for number, text in enumerate(unique):
        for position in places[text]:
            labels[position] = places[unique[root(number)]][0]
    return labels


def matches(texts_a: Sequence[str], texts_b: Sequence[str]) -> list[tuple[int, int]]:
    """All pairs (position in a, position in b) that match, ascending."""
    places_a, places_b = _by_normalised(texts_a), _by_normalised(texts_b)
    unique_a = list(places_a)
    sets_a = [shingles(text) for text in unique_a]
    index = _Index([*sets_a, *map(shingles, places_b)])
    for number, one in enumerate(sets_a):
        index.add(number, one)
    return sorted(
        (a, b)
        for text, positions in places_b.items()
        for number in index.query(shingles(text))
        for a in places_a[unique_a[number]]
        for b in positions
    )


def contained(needles: Sequence[str], haystacks: Sequence[str]) -> list[tuple[int, int]]:
    """All pairs (position in needles, position in haystacks) where the needle occurs in the haystack, ascending.

    With A and B the sets of word 3-shingles of needle and haystack: |A and B| / |A| >= 4/5. A needle of under five
    words occurs where the normalised texts are equal or, if it has at least three words, as a run of whole words.
    """
    places, texts = _by_normalised(needles), _by_normalised(haystacks)
    parts = {text: _needle(text) for text in places}
    known = frozenset(part for own in parts.values() for part in own)
    lengths = {len(part) for part in known}
    held = {text: known & _parts(text, lengths) for text in texts}
    counts = Counter(part for own in held.values() for part in own)
    rank = {part: counts[part] for part in known}
    index: dict[Shingle, list[str]] = defaultdict(list)
    for text, own in parts.items():
        for part in _rarest(own, rank):
            index[part].append(text)
    pairs: list[tuple[int, int]] = []
    for text, own in held.items():
        for needle in {needle for part in own for needle in index.get(part, ())}:
            wanted = parts[needle]
            if DENOMINATOR * len(wanted & own) >= NUMERATOR * len(wanted):
                pairs += [(i, j) for i in places[needle] for j in texts[text]]
    return sorted(pairs)


def _needle(normalised: str) -> frozenset[Shingle]:
    """What to look for: 3-shingles, the run of all words when they are three or four, or else the whole text."""
    words = _WORD.findall(normalised)
    if MIN_RUN <= len(words) < MIN_WORDS:
        return frozenset([("", *words)])  # marked, so it equals no 3-shingle and no whole text
    return shingles(normalised)


def _parts(normalised: str, lengths: set[int]) -> set[Shingle]:
    """Everything that `_needle` may ask for, of the lengths that occur."""
    words = _WORD.findall(normalised)
    found: set[Shingle] = {("", normalised)}
    found.update(_windows(words, WIDTH))
    for size in range(MIN_RUN, MIN_WORDS):
        if size + 1 in lengths:
            found.update(("", *run) for run in _windows(words, size))
    return found
