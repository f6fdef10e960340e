"""Named, independent random streams derived from one seed, none of which touches the global generators."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def derive_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed that depends on `seed` and on every name: streams with different names are independent."""
    key = "\x1f".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1


def generator(seed: int, *names: str | int) -> np.random.Generator:
    """A private numpy generator for the named stream."""
    return np.random.Generator(np.random.PCG64(derive_seed(seed, *names)))


def sample(items: Sequence[T], size: int | None, seed: int, *names: str | int) -> list[T]:
    """`size` of the items by the named stream, all where it is None, in their own order."""
    chosen = generator(seed, *names).permutation(len(items))[:size]
    return [items[i] for i in sorted(chosen.tolist())]
