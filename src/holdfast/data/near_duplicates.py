"""Near-duplicate prompts: exact Jaccard similarity of word 3-shingles, found through an inverted index.

Two prompts match when their normalised texts are equal, or when both have at least five words and
|A and B| / |A or B| >= 0.8 for their sets of word 3-shingles. Shorter prompts have too few shingles for
the ratio to mean anything, so templates such as "How do I ... ?" do not merge.

Prefix filtering keeps this exact: order all shingles from rare to frequent; if the similarity of A and B is
at least t, the first |A| - ceil(t |A|) + 1 shingles of A and the like of B share one. Only those are indexed.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from holdfast.data.examples import normalise

RULE = "jaccard >= 4/5 on word 3-shingles; exact under 5 words"
NUMERATOR, DENOMINATOR = 4, 5
WIDTH = 3
MIN_WORDS = 5

Shingle: TypeAlias = tuple[str, ...]

# Scripts written without spaces (Thai, Lao, Burmese, Khmer, kana, Han): every character counts as a word.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(f"[{_UNSPACED}]|[^\\s{_UNSPACED}]+")


def shingles(normalised: str) -> frozenset[Shingle]:
    """The word 3-shingles of a normalised text; one shingle, the whole text, when it has under five words."""
    words = _WORD.findall(normalised)
    if len(words) < MIN_WORDS:
        return frozenset([("", normalised)])  # two entries, so it equals no 3-shingle
    return frozenset(tuple(words[i : i + WIDTH]) for i in range(len(words) - WIDTH + 1))


def similar(first: frozenset[Shingle], second: frozenset[Shingle]) -> bool:
    """Whether |A and B| / |A or B| >= 4/5, in integers."""
    shared = len(first & second)
    return DENOMINATOR * shared >= NUMERATOR * (len(first) + len(second) - shared)


class _Index:
    """Sets by their rarest shingles."""

    def __init__(self, sets: Iterable[frozenset[Shingle]]) -> None:
        counts = Counter(shingle for one in sets for shingle in one)
        rarest_first = sorted(counts, key=lambda shingle: (counts[shingle], shingle))
        self._rank = {shingle: rank for rank, shingle in enumerate(rarest_first)}
        self._places: dict[Shingle, list[int]] = defaultdict(list)
        self._sets: dict[int, frozenset[Shingle]] = {}

    def _prefix(self, one: frozenset[Shingle]) -> list[Shingle]:
        needed = -(-NUMERATOR * len(one) // DENOMINATOR)  # ceil
        return sorted(one, key=self._rank.__getitem__)[: len(one) - needed + 1]

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
