"""The GGUF reader on a file of one block per storage type, written here by the format's own rules."""

import struct
from pathlib import Path

import numpy as np
import pytest

from holdfast.core.errors import CheckpointError
from holdfast.models.embedded_files import GgufFile

SCALE, LEAST = 0.5, -3.0
WHOLE = np.arange(32, dtype="<f4") / 7
BYTES = np.arange(-16, 16, dtype=np.int8)
HALVES = np.arange(32) % 16


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def pair(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def written(path: Path, *, head: bytes = b"GGUF\x03\x00\x00\x00", last_kind: int = 3) -> Path:
    q8 = struct.pack("<e", SCALE) + BYTES.tobytes()
    q4 = struct.pack("<ee", SCALE, LEAST) + (HALVES[:16] | HALVES[16:] << 4).astype(np.uint8).tobytes()
    parts = (("whole", 0, WHOLE.tobytes()), ("bytes", 8, q8), ("halves", last_kind, q4))
    words = pair("words", 9, struct.pack("<IQ", 8, 2) + string("Ġa") + string(""))
    file = head + struct.pack("<QQ", len(parts), 2) + words + pair("rate", 6, struct.pack("<f", 0.25))
    data = b""
    for name, kind, stored in parts:
        file += string(name) + struct.pack("<IQQIQ", 2, 16, 2, kind, len(data))
        data += stored + b"\0" * (-len(stored) % 32)
    path.write_bytes(file + b"\0" * (-len(file) % 32) + data)
    return path


def test_metadata_and_weights_are_read_by_their_formulas(tmp_path):
    file = GgufFile.read(written(tmp_path / "a.gguf"))
    assert file.metadata == {"words": ["Ġa", ""], "rate": 0.25}
    found = dict(file.tensors())
    expected = {"whole": WHOLE, "bytes": SCALE * BYTES, "halves": SCALE * HALVES + LEAST}
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], np.asarray(values, np.float32).reshape(2, 16), strict=True)


def test_another_version_and_another_storage_type_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no GGUF file of version 3"):
        GgufFile.read(written(tmp_path / "a.gguf", head=b"GGUF\x02\x00\x00\x00"))
    file = GgufFile.read(written(tmp_path / "b.gguf", last_kind=12))
    with pytest.raises(CheckpointError, match="halves has the GGUF storage type 12"):
        dict(file.tensors())
