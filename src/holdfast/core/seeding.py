"""Named, independent random streams derived from one seed, none of which touches the global generators."""

import hashlib

import numpy as np


def derive_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed that depends on `seed` and on every name: streams with different names are independent."""
    key = "\x1f".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1


def generator(seed: int, *names: str | int) -> np.random.Generator:
    """A private numpy generator for the named stream."""
    return np.random.Generator(np.random.PCG64(derive_seed(seed, *names)))
