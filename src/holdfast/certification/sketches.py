"""Prompts that were seen before, nearly: compared by hashes of their word 3-shingles, without any text.

A prompt is given by a mark (`data/shingles.py`): a hash of its text and all its shingles' hashes. Of a prompt that
was opened the smallest 32 hashes are kept, its sketch: a sample of its shingles, and all of them up to 34 words. With S
the sketch, N the hashes of a prompt now, and N' those of N up to the largest of S (N itself, where S is all),

    |S and N| / |S| >= 4/5   the prompt of before is inside the one of now, or
    |S and N'| / |N'| >= 4/5 the one of now is inside the one of before (N' of three hashes or more, or N itself):

then it is no fresh prompt. A prompt of now inside one that is many times longer can be missed: N' is then too small.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

KEPT = 32
NUMERATOR, DENOMINATOR = 4, 5
LEAST = 3
BATCH = 2_000_000  # pairs of equal hashes that are counted at a time

Hashes = NDArray[np.uint64]


class Mark(NamedTuple):
    """A mark, read: the hash of the text, and the hashes of its shingles, ascending."""

    text: str
    hashes: Hashes


def read_mark(mark: str) -> Mark:
    """Split a mark; one without shingles has none."""
    text, _, coded = mark.partition(" ")
    return Mark(text, decoded(coded))


def decoded(coded: str) -> Hashes:
    try:
        return np.frombuffer(base64.b64decode(coded, validate=True), dtype="<u8").astype(np.uint64)
    except binascii.Error as error:
        raise ValueError("not hashes of shingles") from error


def sketch(hashes: Hashes) -> str:
    """The smallest hashes, as text."""
    return base64.b64encode(hashes[:KEPT].astype("<u8").tobytes()).decode("ascii")


def seen(now: Mapping[str, Hashes], before: Mapping[str, str]) -> set[str]:
    """Names of the prompts of now that are nearly one of those with these sketches."""
    names = [name for name, hashes in now.items() if len(hashes)]
    sketches = [decoded(coded) for coded in before.values() if coded]
    if not names or not sketches:
        return set()
    sizes = np.array([len(now[name]) for name in names])
    every = np.concatenate([now[name] for name in names])
    order = np.argsort(every, kind="stable")
    index, owner = every[order], np.repeat(np.arange(len(names)), sizes)[order]
    found = np.zeros(len(names), dtype=np.bool_)
    start = 0
    while start < len(sketches) and not found.all():
        end, low, high = _batch(sketches, start, index)
        batch = sketches[start:end]
        hits = high - low
        theirs = np.repeat(np.repeat(np.arange(len(batch)), [len(one) for one in batch]), hits)
        offsets = np.arange(hits.sum()) - np.repeat(np.cumsum(hits) - hits, hits)
        pairs, shared = np.unique(theirs * len(names) + owner[np.repeat(low, hits) + offsets], return_counts=True)
        _decide(found, pairs // len(names), pairs % len(names), shared, batch, [now[name] for name in names])
        fresh = ~found[owner]
        index, owner = index[fresh], owner[fresh]
        start = end
    return {name for name, one in zip(names, found, strict=True) if one}


def _batch(sketches: list[Hashes], start: int, index: Hashes) -> tuple[int, NDArray[np.intp], NDArray[np.intp]]:
    """So many of the next sketches that their hits stay within `BATCH`, at least one, and where they hit."""
    end, count, lows, highs = start, 0, [], []
    while end < len(sketches) and (end == start or count < BATCH):
        low, high = np.searchsorted(index, sketches[end]), np.searchsorted(index, sketches[end], side="right")
        count += int((high - low).sum())
        lows.append(low)
        highs.append(high)
        end += 1
    return end, np.concatenate(lows), np.concatenate(highs)


def _decide(
    found: NDArray[np.bool_], theirs: NDArray[np.int64], mine: NDArray[np.int64], shared: NDArray[np.int64],
    batch: list[Hashes], now: list[Hashes],
) -> None:  # fmt: skip
    """Set `found` for the prompts of now that are near the sketch they share hashes with."""
    kept = np.array([len(one) for one in batch])
    found[mine[DENOMINATOR * shared >= NUMERATOR * kept[theirs]]] = True
    for old, new, both in zip(theirs.tolist(), mine.tolist(), shared.tolist(), strict=True):
        if not found[new]:
            every = len(now[new])
            some = every if kept[old] < KEPT else int(np.searchsorted(now[new], batch[old][-1], side="right"))
            found[new] = DENOMINATOR * both >= NUMERATOR * some and some >= min(LEAST, every)
