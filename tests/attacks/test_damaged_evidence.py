"""Bits that flip on a disk or on the way: found before anything is computed from them."""

from __future__ import annotations

import random
from collections import Counter

from holdfast.core.errors import CheckpointError
from holdfast.records.audit import Audit
from tests.attacks.runs import audited

__all__ = ["audited"]

FLIPS = 200


def test_flipped_bits_of_a_table(audited):
    """B7: most ended in a traceback, and a quarter changed rows in silence."""
    _, folder = audited()
    path = folder / "audit.parquet"
    whole, draw, found = path.read_bytes(), random.Random(7), Counter()
    for _ in range(FLIPS):
        data = bytearray(whole)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        try:
            Audit.load(folder).table.to_pydict()
            found["believed"] += 1
        except CheckpointError:
            found["refused"] += 1
        except Exception as error:  # noqa: BLE001  (whatever else the first release ended in)
            found[type(error).__name__] += 1
    assert found == {"refused": FLIPS}, found
