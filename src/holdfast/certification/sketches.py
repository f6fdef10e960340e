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
    if not names:
        return set()
    every = np.concatenate([now[name] for name in names])
    order = np.argsort(every, kind="stable")
    index, owner = every[order], np.repeat(np.arange(len(names)), [len(now[name]) for name in names])[order]
    found: set[int] = set()
    for old in (decoded(coded) for coded in before.values() if coded):
        places = zip(np.searchsorted(index, old), np.searchsorted(index, old, side="right"), strict=True)
        mine, shared = np.unique(np.concatenate([owner[low:high] for low, high in places]), return_counts=True)
        pairs = zip(mine.tolist(), shared.tolist(), strict=True)
        fresh = {new for new, both in pairs if new not in found and _near(old, now[names[new]], both)}
        found |= fresh
        if 100 * len(fresh) > len(names):  # variants of one template: every other one would meet them all again
            rest = ~np.isin(owner, list(fresh))
            index, owner = index[rest], owner[rest]
    return {names[place] for place in found}


def _near(old: Hashes, new: Hashes, both: int) -> bool:
    """Whether a prompt of now is near the sketch that it shares `both` hashes with."""
    if DENOMINATOR * both >= NUMERATOR * len(old):
        return True
    some = len(new) if len(old) < KEPT else int(np.searchsorted(new, old[-1], side="right"))
    return DENOMINATOR * both >= NUMERATOR * some and some >= min(LEAST, len(new))
