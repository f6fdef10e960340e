"""Content hashes: what a fingerprint, a split and a checkpoint are bound to."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any


def sha256_text(text: str) -> str:
    """Hex sha256 of the UTF-8 bytes of `text`, lone surrogates kept."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def sha256_json(value: object) -> str:
    """Hex sha256 of the canonical JSON of `value`: sorted keys, no spaces, no NaN."""
    return sha256_text(json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False))


def plain(value: object) -> Any:
    """Settings as JSON values: enumerations by value, sets in sorted order, tuples as lists, unknown types by text."""
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def same_numbers(value: object) -> Any:
    """JSON values with whole floats as integers: `10` and `10.0` are one setting, but not one JSON text."""
    if isinstance(value, Mapping):
        return {key: same_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [same_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's bytes, read in pieces."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sha256_lines(lines: Iterable[str]) -> str:
    """Hex sha256 of a sequence of strings, order kept and boundaries included."""
    digest = hashlib.sha256()
    for line in lines:
        data = line.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
