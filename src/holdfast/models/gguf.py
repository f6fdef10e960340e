"""GGUF files: their metadata and weights, in the three storage types that the embedded model has.

A file is a header, key-value pairs, the table of tensors, and their data from the next multiple of the alignment on
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3, little-endian). transformers reads it too, but
it parses the 147,000 strings and numbers of the vocabulary three times: 30 seconds, where this takes two.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import CheckpointError

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_BLOCK = 32  # weights that share a scale
_BYTES = {_F32: 4 * _BLOCK, _Q4_1: 4 + _BLOCK // 2, _Q8_0: 2 + _BLOCK}  # of a block


class _Cursor:
    """Reads values one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.place = 0

    def number(self, kind: int) -> Any:
        form = struct.Struct("<" + _NUMBERS[kind])
        (value,) = form.unpack_from(self._data, self.place)
        self.place += form.size
        return value

    def string(self) -> str:
        size = self.number(10)
        self.place += size
        return self._data[self.place - size : self.place].decode()

    def value(self, kind: int) -> Any:
        if kind != _ARRAY:
            return self.string() if kind == _STRING else self.number(kind)
        of, size = self.number(4), self.number(10)
        return [self.value(of) for _ in range(size)]


@dataclass(frozen=True)
class GgufFile:
    """One file in memory."""

    metadata: dict[str, Any]
    _table: list[tuple[str, list[int], int, int]]  # name, shape, storage type, first byte
    _data: bytes

    @classmethod
    def read(cls, path: Path) -> "GgufFile":
        """Read a whole file; another version or byte order is refused."""
        data = path.read_bytes()
        if data[:8] != b"GGUF\x03\x00\x00\x00":
            raise CheckpointError(f"{path} is no GGUF file of version 3", remedy="use the file the package ships")
        cursor = _Cursor(data)
        cursor.place = 8
        tensors, pairs = cursor.number(10), cursor.number(10)
        metadata = {cursor.string(): cursor.value(cursor.number(4)) for _ in range(pairs)}
        table = []
        for _ in range(tensors):
            name, dimensions = cursor.string(), cursor.number(4)
            shape = [cursor.number(10) for _ in range(dimensions)][::-1]  # stored fastest first
            table.append((name, shape, cursor.number(4), cursor.number(10)))
        align = metadata.get("general.alignment", 32)
        start = -(-cursor.place // align) * align
        return cls(metadata, [(name, shape, kind, start + first) for name, shape, kind, first in table], data)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every weight by name, as float32."""
        for name, shape, kind, first in self._table:
            if kind not in _BYTES:
                what = f"the weight {name} has the GGUF storage type {kind}; only {sorted(_BYTES)} are read"
                raise CheckpointError(what, remedy="use the file the package ships")
            blocks = int(np.prod(shape)) // _BLOCK
            stored = np.frombuffer(self._data, np.uint8, blocks * _BYTES[kind], first).reshape(blocks, -1)
            yield name, _unpacked(stored, kind).reshape(shape)


def _unpacked(blocks: np.ndarray, kind: int) -> np.ndarray:
    """Q8_0: w = d q with q in -128..127. Q4_1: w = d q + m with q in 0..15, the low halves of the bytes first."""
    if kind == _F32:
        return blocks.view("<f4")
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    if kind == _Q8_0:
        return scale * blocks[:, 2:].view(np.int8).astype(np.float32)
    least = blocks[:, 2:4].copy().view("<f2").astype(np.float32)
    halves = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return scale * halves.astype(np.float32) + least
