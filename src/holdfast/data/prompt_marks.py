"""What prompts are recognised by where no text may be kept: a hash of the text, and hashes of its word 3-shingles.

A mark reads `text:HASH`, and where the text has three words or more `text:HASH SHINGLES`: the shingles' 64-bit hashes,
ascending, eight bytes each, in base64. A shingle's hash is a function of its three words alone. Of a text with a core
(`near_duplicates`) they are those of its core: what many prompts of a set have in common recognises none of them.
"""

import base64
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from holdfast.core.hashing import sha256_text
from holdfast.data.examples import Example, normalise, prompt_text
from holdfast.data.shingles import MIN_CORE, WIDTH, common_limit, distinct, occurrences

Hashes = NDArray[np.uint64]


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
    found = occurrences(texts, limit=common_limit(len(texts)), min_words=WIDTH)
    core = distinct((found.text * max(found.kinds, 1) + found.shingle)[found.free]) // max(found.kinds, 1)
    cored = np.bincount(core, minlength=len(texts)) >= MIN_CORE
    chosen = found.free | ~cored[found.text]
    text, at = found.text[chosen], found.at[chosen]
    digests = (blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest() for word in found.vocabulary)
    of_words = np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)
    hashes = _mixed(of_words[found.flat[at[:, None] + np.arange(WIDTH)]])
    order = np.lexsort((hashes, text))
    text, hashes = text[order], hashes[order]
    new = np.ones(len(text), dtype=np.bool_)
    new[1:] = (text[1:] != text[:-1]) | (hashes[1:] != hashes[:-1])
    text, hashes = text[new], hashes[new]
    return np.split(hashes, np.searchsorted(text, np.arange(1, len(texts)))) if texts else []


def _mixed(parts: Hashes) -> Hashes:
    """One hash for three in their order: Horner's rule with an odd factor, then the finaliser of splitmix64."""
    found = np.zeros(len(parts), dtype=np.uint64)
    for place in range(WIDTH):
        found = found * np.uint64(0x9E3779B97F4A7C15) + parts[:, place]
        found ^= found >> np.uint64(29)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        found = (found ^ (found >> np.uint64(shift))) * np.uint64(factor)
    return found ^ (found >> np.uint64(31))
