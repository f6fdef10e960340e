"""`manifest.json`: the sha256 and size of every file in a checkpoint, and what the checkpoint is bound to.

It is sealed (`core.sealed_json`), so a changed byte anywhere in the folder, the manifest included, is noticed.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.core.files import fsync_path
from holdfast.core.hashing import sha256_file
from holdfast.core.sealed_json import SEAL, read_sealed, write_sealed

SCHEMA = 1
MANIFEST = "manifest.json"
ANOTHER = "resume from another checkpoint, or start again in a new output_dir"


@dataclass(frozen=True)
class Manifest:
    """What a manifest says."""

    schema: int  # layout version of the checkpoint folder
    step: int  # the optimizer step the checkpoint was taken after
    files: dict[str, dict[str, Any]]  # relative POSIX name -> `{"sha256": hex, "size": bytes}`, of every other file
    fingerprint: dict[str, Any]  # hashes and settings the checkpoint is bound to


def write_manifest(folder: Path, *, step: int, fingerprint: dict[str, Any]) -> None:
    """Flush every file below `folder` to disk, then write the manifest, last."""
    names = [name for name in _files(folder) if name != MANIFEST]
    for name in names:
        fsync_path(folder / name)
    for inner, _, _ in os.walk(folder):
        fsync_path(Path(inner))
    files = {name: _describe(folder / name) for name in names}
    write_sealed(folder / MANIFEST, asdict(Manifest(SCHEMA, step, files, fingerprint)))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint: not one byte of it changed, of this schema, for the step in the folder's name."""
    if folder.is_symlink():
        raise CheckpointError(f"{folder} is a symbolic link", remedy=ANOTHER)
    if not (folder / MANIFEST).exists():
        raise CheckpointError(f"{folder}: {MANIFEST} is missing", remedy=ANOTHER)
    body = read_sealed(folder / MANIFEST, remedy=ANOTHER)
    del body[SEAL]
    try:
        manifest = Manifest(**body)
    except TypeError as error:
        raise CheckpointError(f"{folder}: {MANIFEST} has other fields than a manifest", remedy=ANOTHER) from error
    if manifest.schema != SCHEMA or not folder.name.endswith(f"checkpoint-{manifest.step}"):
        raise CheckpointError(
            f"{folder}: {MANIFEST} is for step {manifest.step} in schema {manifest.schema}, "
            f"expected the step in the folder's name and schema {SCHEMA}",
            remedy=ANOTHER,
        )
    return manifest


def verify_folder(folder: Path) -> None:
    """Check every byte of a checkpoint against its manifest; the damaged, missing or extra file is named."""
    recorded = read_manifest(folder).files
    present = set(_files(folder)) - {MANIFEST}
    for name in sorted(recorded.keys() | present):
        if name not in present:
            raise CheckpointError(f"{folder}: {name} is missing", remedy=ANOTHER)
        if name not in recorded:
            raise CheckpointError(f"{folder}: {name} is not in the manifest (extra file)", remedy=ANOTHER)
        try:
            found = _describe(folder / name)
        except OSError as error:
            raise CheckpointError(f"{folder}: {name} cannot be read: {error}", remedy=ANOTHER) from error
        if found != recorded[name]:
            size, expected = found["size"], recorded[name]["size"]
            reason = f"{size} bytes, expected {expected}" if size != expected else "its sha256 differs"
            raise CheckpointError(f"{folder}: {name} is damaged ({reason})", remedy=ANOTHER)


def plain_fingerprint(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping as JSON gives it back, so that a tuple compares equal to the list it is stored as."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(fingerprint), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a checkpoint fingerprint must be JSON: {error}", remedy="use strings, finite numbers, lists and dicts"
        ) from error
    return plain


def fingerprint_differences(stored: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Dotted key -> (stored, current) as shortened JSON, for every leaf that is not the same."""
    old, new = dict(_leaves(plain_fingerprint(stored))), dict(_leaves(plain_fingerprint(current)))
    pairs = {key: (old.get(key, "absent"), new.get(key, "absent")) for key in sorted(old.keys() | new.keys())}
    return {key: (_short(a), _short(b)) for key, (a, b) in pairs.items() if a != b}


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key and JSON text of everything that is not a mapping; an empty mapping inside is a leaf."""
    if isinstance(value, dict) and (value or not prefix):
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, json.dumps(value, sort_keys=True)


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."


def _describe(path: Path) -> dict[str, Any]:
    return {"sha256": sha256_file(path), "size": path.stat().st_size}


def _files(folder: Path) -> list[str]:
    """Relative POSIX names of all regular files below `folder`; a link or special file is refused."""
    names = []
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise CheckpointError(
                f"{folder}: {path.relative_to(folder)} is a link or special file", remedy="store regular files only"
            )
        if path.is_file():
            names.append(path.relative_to(folder).as_posix())
    return sorted(names)
