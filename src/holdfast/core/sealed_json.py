"""JSON files that carry the sha256 of their own content, so that a flipped bit, a cut end or an edit is noticed.

The file is the canonical text of an object (`core.files.json_text`). One key holds the sha256 of the canonical JSON of
all others. A seal shows damage and careless edits; whoever edits a file can compute its seal again.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core.errors import CheckpointError
from holdfast.core.files import json_text, read_plain_file, write_text
from holdfast.core.hashing import sha256_json

SEAL = "sha256"
RESTORE = "restore the file from a backup, or make it again with the command that wrote it"


def sealed(values: Mapping[str, object], *, key: str = SEAL) -> dict[str, Any]:
    """The object with the sha256 of everything else under `key`; an old seal is replaced."""
    rest = {name: value for name, value in values.items() if name != key}
    return {**rest, key: sha256_json(rest)}


def write_sealed(path: Path, values: Mapping[str, object], *, key: str = SEAL) -> str:
    """Write a sealed object, atomically; returns its seal."""
    whole = sealed(values, key=key)
    write_text(path, json_text(whole))
    return str(whole[key])


def read_sealed(path: Path, *, key: str = SEAL, remedy: str = RESTORE) -> dict[str, Any]:
    """The object of a sealed file, its seal included; a symbolic link is not followed."""
    data = read_plain_file(path, remedy=remedy)
    try:
        value = json.loads(data.decode("ascii"))
        if not isinstance(value, dict):
            raise CheckpointError(f"{path} does not hold an object", remedy=remedy)
        if key not in value:
            what = f"{path} carries no checksum ({key!r}): the first release of holdfast wrote none"
            raise CheckpointError(what, remedy=remedy)
        intact = sealed(value, key=key) == value and json_text(value).encode("ascii") == data
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({type(error).__name__})", remedy=remedy) from error
    if not intact:
        raise CheckpointError(f"{path} was changed: its content does not match its checksum", remedy=remedy)
    return value
