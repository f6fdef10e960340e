"""Writing files so that a reader sees the old content or the new, never a mixture."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from pyarrow import Table


def fsync_path(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, data: bytes, *, mode: int | None = None) -> None:
    write_parts(path, (data,), mode=mode)


def write_parts(path: Path, parts: Iterable[bytes], *, mode: int | None = None) -> None:
    """Atomic write: temporary file beside the target, fsync, rename, fsync of the folder; `mode` whatever the umask."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        allowed = 0o666 if mode is None else mode
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, allowed)) as handle:
            if mode is not None:
                os.fchmod(handle.fileno(), mode)
            handle.writelines(parts)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)  # noqa: PTH105  (atomic on every platform)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` that becomes it at the end, in one rename, so that no reader sees half of it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        for path in temporary.rglob("*"):
            fsync_path(path)
        temporary.rename(target)
        fsync_path(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def require_writable(folder: Path) -> None:
    """Refuse a folder in which nothing can be written, before work is spent on what goes there; nothing is made."""
    if (there := unwritable(folder)) is not None:
        what = f"{folder} cannot be written: {there} is {'read-only' if there.is_dir() else 'no folder'}"
        raise ConfigError(what, remedy="name a place that you may write")


def unwritable(folder: Path) -> Path | None:
    """What keeps a folder from being written or made: the nearest part of its path that is there; None if nothing."""
    path = folder.expanduser().absolute()
    there = next(place for place in (path, *path.parents) if place.exists())
    return None if there.is_dir() and os.access(there, os.W_OK | os.X_OK) else there


def write_text(path: Path, text: str, *, mode: int | None = None) -> None:
    write_bytes(path, text.encode("utf-8"), mode=mode)


def write_json(path: Path, value: object) -> None:
    """Atomic write of indented JSON; NaN and infinity are refused, since no other reader accepts them."""
    write_text(path, json_text(value))


def json_text(value: object) -> str:
    """Indented JSON with sorted keys, ASCII only, ended by a newline; a ValueError for NaN and infinity."""
    return json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"


def read_json(path: Path) -> Any:
    """Read JSON that we wrote; a damaged file is a `CheckpointError` naming it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        remedy = "delete the file or restore it from a backup"
        raise CheckpointError(f"{path} cannot be read as JSON: {error}", remedy=remedy) from error


def read_plain_file(path: Path, *, remedy: str) -> bytes:
    """All bytes of an ordinary file; a link at its place is not followed, a pipe or device not opened."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise CheckpointError(f"{path} is no ordinary file", remedy=remedy)
            with open(handle, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(handle)
    except OSError as error:
        linked = error.errno == errno.ELOOP
        why = (error.strerror or type(error).__name__).lower()
        fault = "is a symbolic link, which is not followed" if linked else f"cannot be read: {why}"
        raise CheckpointError(f"{path} {fault}", remedy=remedy) from error


def parse_parquet(data: bytes) -> Table:
    """The table in the bytes of a Parquet file, read without a thread.

    pyarrow 26 starts threads to read even a small table, and a process that ends before they have settled is aborted
    (SIGABRT, exit 134, after everything it had to say was said).
    """
    import pyarrow
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(pyarrow.BufferReader(data)).read(use_threads=False)
