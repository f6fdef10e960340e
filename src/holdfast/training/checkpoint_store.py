"""Checkpoint folders that are either whole and verified, or not used.

`manifest.json` has the sha256 and size of every other file, and what the checkpoint is bound to. It is sealed
(`core.sealed_json`), so a changed byte anywhere in the folder, the manifest included, is noticed.

Write protocol: fill `.tmp-checkpoint-N`, fsync every file, write `manifest.json` last, rename to `checkpoint-N`, fsync
the folder above. A process killed at any instant leaves the previous checkpoint or the new one, never a mixture:

| name in the root            | meaning                                      | `clean()`              |
|-----------------------------|----------------------------------------------|------------------------|
| `checkpoint-N`              | committed                                    | kept                   |
| `.tmp-*`                    | being written, or being deleted              | removed                |
| `.old-checkpoint-N`         | former `checkpoint-N` while a new one enters | restored, else removed |
| `quarantine-checkpoint-N-k` | did not verify                               | kept                   |

One process at a time changes a root (`RunLock`); several ranks may write into the staged folder.
"""

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from holdfast.core.errors import CheckpointError, ConfigError, ResourceError
from holdfast.core.files import fsync_path
from holdfast.core.hashing import sha256_file
from holdfast.core.sealed_json import SEAL, read_sealed, write_sealed

SCHEMA = 1
MANIFEST = "manifest.json"
ANOTHER = "resume from another checkpoint, or start again in a new output_dir"
_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*)")


class CheckpointStore:
    """The checkpoints of one run, in `root`, which the first `stage` creates.

    It may itself be a symbolic link (a run on a larger disk); below it no link that leads outside is written through.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def staging(self, step: int) -> Path:
        """Where the files of `step` are written before `commit`; for ranks that did not call `stage`."""
        return self.root / f".tmp-checkpoint-{step}"

    def checkpoints(self) -> list[Path]:
        """Committed folders by ascending step, verified or not."""
        entries = self.root.iterdir() if self.root.is_dir() else ()
        return sorted((path for path in entries if _NAME.fullmatch(path.name)), key=step_of)

    def stage(self, step: int) -> Path:
        """Create the empty staging folder of `step` (one rank calls it), removing a stale one."""
        with self.disk_guard(step):
            self.root.mkdir(parents=True, exist_ok=True)
            path = self.staging(step)
            _remove(path)
            path.mkdir()
            return path

    @contextmanager
    def disk_guard(self, step: int) -> Iterator[None]:
        """Turn a failed write (disk full, file-size limit) into `ResourceError` and remove the staged files.

        safetensors reports a full disk as its own error type, which is not an `OSError`.
        """
        try:
            yield
        except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
            shutil.rmtree(self.staging(step), ignore_errors=True)
            raise ResourceError(
                f"checkpoint {step} could not be written to {self.root}: {error}",
                remedy="free disk space or raise the file-size limit, then resume",
            ) from error

    def commit(self, step: int, *, fingerprint: Mapping[str, object]) -> Path:
        """Seal the staged folder with a manifest, bind it to `fingerprint` (JSON) and give it its final name."""
        staged, final = self.staging(step), self.root / f"checkpoint-{step}"
        if staged.is_symlink() or not staged.resolve().is_relative_to(self.root.resolve()):
            raise CheckpointError(
                f"{staged} is a symbolic link or leads outside {self.root}",
                remedy="remove the link; point output_dir at the real folder instead",
            )
        plain = plain_fingerprint(fingerprint)
        with self.disk_guard(step):
            if not staged.is_dir():
                raise CheckpointError(f"{staged} does not exist", remedy="call stage(step) before commit")
            _write_manifest(staged, step=step, fingerprint=plain)
            self._publish(staged, final)
        return final

    def _publish(self, staged: Path, final: Path) -> None:
        """Rename `staged` to `final`; a former `final` steps aside and is deleted only afterwards."""
        aside = self.root / f".old-{final.name}"
        replaces = final.exists() or final.is_symlink()
        if replaces:
            _remove(aside)
            final.rename(aside)
        try:
            staged.rename(final)
        except OSError:
            if replaces:
                aside.rename(final)
            raise
        fsync_path(self.root)
        if replaces:  # committed by now: what cannot be deleted here is left to `clean`
            shutil.rmtree(aside, ignore_errors=True)

    def verify(self, path: Path) -> None:
        """Check every byte of a checkpoint against its manifest; the damaged, missing or extra file is named."""
        recorded: dict[str, dict[str, Any]] = _read_manifest(path)["files"]
        present = set(_files(path)) - {MANIFEST}
        for name in sorted(recorded.keys() | present):
            if name not in present:
                raise CheckpointError(f"{path}: {name} is missing", remedy=ANOTHER)
            if name not in recorded:
                raise CheckpointError(f"{path}: {name} is not in the manifest (extra file)", remedy=ANOTHER)
            try:
                found = _describe(path / name)
            except OSError as error:
                raise CheckpointError(f"{path}: {name} cannot be read: {error}", remedy=ANOTHER) from error
            if found != recorded[name]:
                size, expected = found["size"], recorded[name]["size"]
                reason = f"{size} bytes, expected {expected}" if size != expected else "its sha256 differs"
                raise CheckpointError(f"{path}: {name} is damaged ({reason})", remedy=ANOTHER)

    def latest(self, *, log: Callable[[str], None]) -> Path | None:
        """The newest checkpoint that verifies; damaged newer ones are renamed `quarantine-*` and logged.

        None when the root holds no checkpoint at all; where there are some and none verifies, that is an error.
        """
        self._restore_orphans()
        for path in reversed(self.checkpoints()):
            try:
                self.verify(path)
            except CheckpointError as error:
                log(f"damaged checkpoint set aside as {self._quarantine(path).name}: {error.what}")
            else:
                return path
        # Quarantined ones count: a second attempt must not silently start from nothing.
        damaged = sorted(path.name for path in self.root.glob("quarantine-checkpoint-*"))
        if damaged:
            raise CheckpointError(
                f"{self.root}: none of the checkpoints verifies ({', '.join(damaged)})",
                remedy="restore one from a backup, or delete the quarantine folders to start from step 0",
            )
        return None

    def _quarantine(self, path: Path) -> Path:
        targets = (self.root / f"quarantine-{path.name}-{number}" for number in itertools.count(1))
        target = next(target for target in targets if not target.exists())
        path.rename(target)
        fsync_path(self.root)
        return target

    def fingerprint(self, path: Path) -> dict[str, Any]:
        stored: dict[str, Any] = _read_manifest(path)["fingerprint"]
        return stored

    def require_same_fingerprint(self, path: Path, current: Mapping[str, object]) -> None:
        """Refuse a checkpoint that belongs to other data, settings or code, listing every differing key."""
        differing = fingerprint_differences(self.fingerprint(path), current)
        if differing:
            listed = "; ".join(f"{key}: stored {old}, current {new}" for key, (old, new) in differing.items())
            raise CheckpointError(
                f"{path} belongs to another run: {listed}",
                remedy="restore these settings and inputs, or start again in a new output_dir",
            )

    def rotate(self, keep: int | None, protect: set[Path]) -> None:
        """Delete the oldest checkpoints until `keep` are left (None: all), never the newest nor a protected one."""
        if keep is None:
            return
        committed = self.checkpoints()
        protected = {path.resolve() for path in (*protect, *committed[-1:])}
        removable = [path for path in committed if path.resolve() not in protected]
        for path in removable[: max(0, len(committed) - keep)]:
            doomed = self.root / f".tmp-delete-{path.name}"  # a half-deleted folder must not pass for a damaged one
            _remove(doomed)
            shutil.rmtree(path.rename(doomed), ignore_errors=True)

    def clean(self) -> None:
        """Finish what a killed process left: called once at the start, before `latest`."""
        self._restore_orphans()
        for pattern in (".tmp-*", ".old-checkpoint-*"):
            for path in sorted(self.root.glob(pattern)):
                _remove(path)

    def _restore_orphans(self) -> None:
        for aside in sorted(self.root.glob(".old-checkpoint-*")):
            final = self.root / aside.name.removeprefix(".old-")
            if not final.exists():
                aside.rename(final)
                fsync_path(self.root)


def step_of(path: Path) -> int:
    """The step after which a checkpoint folder was taken."""
    return int(path.name.rpartition("-")[2])


def _remove(path: Path) -> None:
    """Delete a folder, or a link without what it points to; nothing when absent."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _write_manifest(folder: Path, *, step: int, fingerprint: Mapping[str, object]) -> None:
    """Flush every file below `folder` to disk, then write the manifest, last."""
    names = [name for name in _files(folder) if name != MANIFEST]
    for name in names:
        fsync_path(folder / name)
    for inner, _, _ in os.walk(folder):
        fsync_path(Path(inner))
    files = {name: _describe(folder / name) for name in names}
    write_sealed(folder / MANIFEST, {"schema": SCHEMA, "step": step, "files": files, "fingerprint": fingerprint})


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: not one byte of it changed, of this schema, for the step in the folder's name."""
    if folder.is_symlink():
        raise CheckpointError(f"{folder} is a symbolic link", remedy=ANOTHER)
    if not (folder / MANIFEST).exists():
        raise CheckpointError(f"{folder}: {MANIFEST} is missing", remedy=ANOTHER)
    manifest = read_sealed(folder / MANIFEST, remedy=ANOTHER)
    if set(manifest) != {"schema", "step", "files", "fingerprint", SEAL}:
        raise CheckpointError(f"{folder}: {MANIFEST} has other fields than a manifest", remedy=ANOTHER)
    if manifest["schema"] != SCHEMA or not folder.name.endswith(f"checkpoint-{manifest['step']}"):
        raise CheckpointError(
            f"{folder}: {MANIFEST} is for step {manifest['step']} in schema {manifest['schema']}, "
            f"expected the step in the folder's name and schema {SCHEMA}",
            remedy=ANOTHER,
        )
    return manifest


def plain_fingerprint(fingerprint: Mapping[str, object]) -> dict[str, object]:
    """The mapping as JSON gives it back, so that a tuple compares equal to the list it is stored as."""
    try:
        return json.loads(json.dumps(dict(fingerprint), allow_nan=False))  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a checkpoint fingerprint must be JSON: {error}", remedy="use strings, finite numbers, lists and dicts"
        ) from error


def fingerprint_differences(stored: Mapping[str, object], current: Mapping[str, object]) -> dict[str, tuple[str, str]]:
    """Dotted key -> (stored, current) as shortened JSON, for every leaf that is not the same."""
    old, new = dict(_leaves(plain_fingerprint(stored))), dict(_leaves(plain_fingerprint(current)))
    pairs = {key: (old.get(key, "absent"), new.get(key, "absent")) for key in sorted(old.keys() | new.keys())}
    return {key: (_short(a), _short(b)) for key, (a, b) in pairs.items() if a != b}


def _leaves(value: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key and JSON text of everything that is not a mapping; an empty mapping inside is a leaf."""
    if isinstance(value, dict) and (value or not prefix):
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, json.dumps(value, sort_keys=True)


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."


def _describe(path: Path) -> dict[str, object]:
    return {"sha256": sha256_file(path), "size": path.stat().st_size}


def _files(folder: Path) -> list[str]:
    """Relative POSIX names of all regular files below `folder`; a link or special file is refused."""
    entries = list(folder.rglob("*"))
    for path in entries:
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise CheckpointError(
                f"{folder}: {path.relative_to(folder)} is a link or special file", remedy="store regular files only"
            )
    return sorted(path.relative_to(folder).as_posix() for path in entries if path.is_file())
