"""Texts as sets of word 3-shingles, numbered from rare to frequent, and which shingles are common to many texts.

A shingle is common when more than `limit` texts hold it. The core of a text are its shingles none of whose words lies
in a common shingle: what is left when templates, system prompts and jailbreak prefixes are cut away.

Sets are similar where |A and B| / |A or B| >= 4/5, exactly, by prefix filtering: whatever holds 4/5 of A holds one of
its |A| - ceil(4/5 |A|) + 1 rarest values, and is looked for through these; of two similar sets each holds 4/5 of the
other, so that their rarest values meet. Only what meets is compared.

Where no text may be kept, prompts are recognised by marks: `text:HASH`, and where the text has three words or more
`text:HASH SHINGLES`, the 64-bit hashes of its core's shingles (of all, where it has no core), ascending, eight bytes
each, in base64. A shingle's hash depends on its three words alone.
"""

import base64
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count

import numpy as np
from numpy.typing import NDArray

from holdfast.core.hashing import sha256_text
from holdfast.data.examples import Example, normalise, prompt_text

NUMERATOR, DENOMINATOR = 4, 5
WIDTH = 3
MIN_WORDS = 5  # a shorter text has too few shingles for a ratio to mean anything
MIN_CORE = MIN_WORDS - WIDTH + 1  # shingles of a core that can be compared: those of the shortest text with a ratio
COMMON_SHARE = 100  # a shingle is common in over one of so many texts, and
COMMON_FLOOR = 10  # in over so many: 1 % of a few hundred texts is a handful, which a family of variants reaches

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]
Hashes = NDArray[np.uint64]
Wanted = Callable[[int, Numbers], Numbers]  # of a set and others: those others that are worth comparing with it

# Scripts written without spaces (Thai, Lao, Burmese, Khmer, kana, Han): every character counts as a word.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(f"[{_UNSPACED}]|[^\\s{_UNSPACED}]+")
_ANY_UNSPACED = re.compile(f"[{_UNSPACED}]")
_LARGEST = 2**63


def words(normalised: str) -> list[str]:
    return _WORD.findall(normalised) if _ANY_UNSPACED.search(normalised) else normalised.split()


def common_limit(texts: int) -> int:
    """The most texts that may hold a shingle which is not common: 1 % of them, and never under ten."""
    return max(COMMON_FLOOR, texts // COMMON_SHARE)


def distinct(values: Numbers) -> Numbers:
    """The different values, ascending; faster here than `np.unique`, which hashes."""
    ordered = np.sort(values)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if len(ordered) else ordered


def by_normalised(texts: Sequence[str]) -> dict[str, list[int]]:
    """Normalised text to the positions that have it."""
    places: dict[str, list[int]] = defaultdict(list)
    for position, text in enumerate(texts):
        places[normalise(text)].append(position)
    return places


@dataclass(frozen=True, slots=True)
class Sets:
    """Sets of numbers: set i is `values[starts[i] : starts[i + 1]]`, ascending."""

    starts: Numbers
    values: Numbers

    @property
    def sizes(self) -> Numbers:
        return np.diff(self.starts)

    def row(self, number: int) -> Numbers:
        return self.values[self.starts[number] : self.starts[number + 1]]

    def rows(self, numbers: Numbers) -> "Sets":
        """The sets with these numbers, in this order."""
        sizes = self.sizes[numbers]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        return Sets(starts, self.values[np.repeat(self.starts[numbers] - starts[:-1], sizes) + np.arange(starts[-1])])

    def where(self, kept: Flags) -> "Sets":
        """The values with a flag, each in its set."""
        ends = np.concatenate([[0], np.cumsum(kept)])
        return Sets(ends[self.starts], self.values[kept])


@dataclass(frozen=True, slots=True)
class Shingles:
    """The shingles of different normalised texts."""

    every: Sets  # per text its shingles, numbered from rare to frequent; a text of under five words has none
    common: int  # shingles with this number and above are common
    core: Sets  # per text, those of its shingles that share no word with a common one

    @property
    def own(self) -> Sets:
        """Per text, its shingles that are not common."""
        return self.every.where(self.every.values < self.common)


@dataclass(frozen=True, slots=True)
class Occurrences:
    """Every run of three words in different normalised texts."""

    texts: int  # how many there are
    flat: Numbers  # the words of all texts, as numbers of `vocabulary`
    vocabulary: list[str]
    text: Numbers  # per run, the text that it is in
    at: Numbers  # per run, the place in `flat` where it begins
    shingle: Numbers  # per run, its number, from rare to frequent, common ones last
    free: Flags  # per run, whether none of its words lies in a common shingle
    kinds: int  # how many different shingles there are; `common` is the number of the first common one
    common: int

    def sets(self, chosen: Flags | slice = slice(None)) -> Sets:
        """Per text, its different shingles, of the chosen runs."""
        kinds = max(self.kinds, 1)
        unique = distinct((self.text * kinds + self.shingle)[chosen])
        return Sets(np.searchsorted(unique, np.arange(self.texts + 1) * kinds).astype(np.int64), unique % kinds)


def occurrences(
    texts: Sequence[str], *, limit: int | None, counted: int | None = None, min_words: int = MIN_WORDS
) -> Occurrences:
    """Number the shingles of the texts that have `min_words`; otherwise as `shingles_of`."""
    lengths, flat, vocabulary = _numbered(texts)
    owner = np.repeat(np.arange(len(texts)), lengths)
    first, last = owner[: -WIDTH + 1], owner[WIDTH - 1 :]
    at = np.flatnonzero((first == last) & (lengths[first] >= min_words))
    text = owner[at]
    size = max(len(vocabulary), 1)
    pair = flat[at] * size + flat[at + 1]
    if size**WIDTH >= _LARGEST:  # numbers of pairs are fewer than pairs of numbers
        _, pair = np.unique(pair, return_inverse=True)
    _, code = np.unique(pair * size + flat[at + 2], return_inverse=True)
    kinds = int(code.max(initial=-1)) + 1
    held = distinct(text * kinds + code)
    asked = held if counted is None else held[held < counted * kinds]
    widespread = np.bincount(asked % max(kinds, 1), minlength=kinds) > (len(texts) if limit is None else limit)
    counts = np.bincount(held % max(kinds, 1), minlength=kinds)
    rank = np.empty(kinds, dtype=np.int64)
    rank[np.lexsort((counts, widespread))] = np.arange(kinds)
    covered = np.zeros(len(flat), dtype=np.bool_)
    for offset in range(WIDTH):
        covered[at[widespread[code]] + offset] = True
    free = ~(covered[at] | covered[at + 1] | covered[at + 2])
    common = kinds - int(np.count_nonzero(widespread))
    return Occurrences(len(texts), flat, vocabulary, text, at, rank[code], free, kinds, common)


def shingles_of(texts: Sequence[str], *, limit: int | None, counted: int | None = None) -> Shingles:
    """The sets of shingles of different normalised texts; common are those that more than `limit` texts hold.

    None is common without a limit; only the first `counted` texts are asked for that, where it is given.
    """
    occurring = occurrences(texts, limit=limit, counted=counted)
    every = occurring.sets()
    return Shingles(every, occurring.common, every if occurring.free.all() else occurring.sets(occurring.free))


def _numbered(texts: Sequence[str]) -> tuple[Numbers, Numbers, list[str]]:
    # A new word gets the next number; by `vocabulary.__len__`, its words would stay until garbage is collected.
    vocabulary: defaultdict[str, int] = defaultdict(count().__next__)
    lengths, flat = array("q"), array("q")
    for text in texts:
        held = words(text)
        lengths.append(len(held))
        flat.extend(map(vocabulary.__getitem__, held))
    return np.array(lengths, dtype=np.int64), np.array(flat, dtype=np.int64), list(vocabulary)


def overlaps(mine: Numbers, sets: Sets, others: Numbers) -> Numbers:
    """How many values a set shares with each of the others."""
    theirs = sets.rows(others)
    place = np.searchsorted(mine, theirs.values)
    place[place == len(mine)] = 0
    hits = np.concatenate([[0], np.cumsum(mine[place] == theirs.values)])
    return np.asarray(hits[theirs.starts[1:]] - hits[theirs.starts[:-1]])


def equal_sets(sets: Sets, order: Numbers) -> tuple[list[Numbers], Sets]:
    """The numbers of the sets that are equal, together, from small to large in `order`; and one set of each."""
    kinds: dict[bytes, list[int]] = defaultdict(list)
    for number in np.argsort(order, kind="stable").tolist():
        kinds[sets.row(number).tobytes()].append(number)
    equal = [np.array(numbers) for numbers in kinds.values()]
    return equal, sets.rows(np.array([numbers[0] for numbers in equal], dtype=np.int64))


def similar(sets: Sets, wanted: Wanted, *, below: int | None = None) -> Iterator[tuple[int, Numbers, Numbers]]:
    """Sets with others that are similar to them, and how much they share; every pair comes once.

    Only candidates that are `wanted` are compared, and only pairs that share a value under `below`.
    """
    rare, sizes = _rarest(sets, below), sets.sizes
    rare = rare.where(np.bincount(rare.values)[rare.values] > 1)
    turn = np.empty(len(sizes), dtype=np.int64)
    turn[np.argsort(sizes, kind="stable")] = np.arange(len(sizes))
    for one, others in _meeting(rare, rare):
        not_larger = (turn[others] < turn[one]) & (DENOMINATOR * sizes[others] >= NUMERATOR * sizes[one])
        chosen = wanted(one, others[not_larger])
        if len(chosen):
            shared = overlaps(sets.row(one), sets, chosen)
            fits = DENOMINATOR * shared >= NUMERATOR * (sizes[one] + sizes[chosen] - shared)
            if fits.any():
                yield one, chosen[fits], shared[fits]


def holding(
    needles: Sets, haystacks: Sets, *, done: Callable[[int], bool] | None = None, below: int | None = None
) -> Iterator[tuple[int, Numbers, Numbers]]:
    """Sets A with the sets B that hold |A and B| / |A| >= 4/5 of them, and how much that is.

    Needles that are `done` are left out; the others are looked for through values under `below`.
    """
    sizes = needles.sizes
    for one, others in _meeting(_rarest(needles, below), haystacks):
        if done is None or not done(one):
            shared = overlaps(needles.row(one), haystacks, others)
            fits = DENOMINATOR * shared >= NUMERATOR * sizes[one]
            if fits.any():
                yield one, others[fits], shared[fits]


def _rarest(sets: Sets, below: int | None) -> Sets:
    """Of each set its |A| - ceil(4/5 |A|) + 1 rarest values; only those under `below`, where that is given."""
    sizes = sets.sizes
    position = np.arange(len(sets.values)) - np.repeat(sets.starts[:-1], sizes)
    kept = position <= np.repeat(sizes + (-NUMERATOR * sizes // DENOMINATOR), sizes)
    return sets.where(kept if below is None else kept & (sets.values < below))


def _meeting(asked: Sets, listed: Sets) -> Iterator[tuple[int, Numbers]]:
    """Each set of the one collection with those of the other that share a value with it; none without."""
    order = np.argsort(listed.values, kind="stable")
    value, owner = listed.values[order], np.repeat(np.arange(len(listed.starts) - 1), listed.sizes)[order]
    low, high = np.searchsorted(value, asked.values), np.searchsorted(value, asked.values, side="right")
    hits = np.concatenate([[0], np.cumsum(low < high)])[asked.starts]
    for one in np.flatnonzero(np.diff(hits)).tolist():
        own = slice(asked.starts[one], asked.starts[one + 1])
        found = [owner[a:b] for a, b in zip(low[own].tolist(), high[own].tolist(), strict=True)]
        yield one, distinct(np.concatenate(found))


def prompt_marks(examples: Iterable[Example]) -> dict[str, str]:
    """By id, the mark of the prompt: the same prompt with another completion has another id and the same mark."""
    texts = {example.id: normalise(prompt_text(example)) for example in examples}
    unique = list(dict.fromkeys(texts.values()))
    marks = {}
    for text, hashes in zip(unique, shingle_hashes(unique), strict=True):
        coded = base64.b64encode(hashes.astype("<u8").tobytes()).decode("ascii")
        marks[text] = f"text:{sha256_text(text)[:16]} {coded}".rstrip()
    return {name: marks[text] for name, text in texts.items()}


def shingle_hashes(texts: list[str]) -> list[Hashes]:
    """Of each of different normalised texts: the hashes of its core, or of all its shingles; ascending."""
    occurring = occurrences(texts, limit=common_limit(len(texts)), min_words=WIDTH)
    cored = occurring.sets(occurring.free).sizes >= MIN_CORE
    chosen = occurring.free | ~cored[occurring.text]
    text, at = occurring.text[chosen], occurring.at[chosen]
    digests = (blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest() for word in occurring.vocabulary)
    of_words = np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)
    hashes = _mixed(of_words[occurring.flat[at[:, None] + np.arange(WIDTH)]])
    order = np.argsort(text, kind="stable")
    ends = np.searchsorted(text[order], np.arange(1, len(texts)))
    return [np.unique(own) for own in np.split(hashes[order], ends)] if texts else []


def _mixed(parts: Hashes) -> Hashes:
    """One hash for three in their order: Horner's rule with an odd factor, then the finaliser of splitmix64."""
    mixed = np.zeros(len(parts), dtype=np.uint64)
    for place in range(WIDTH):
        mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + parts[:, place]
        mixed ^= mixed >> np.uint64(29)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
