"""`events.jsonl`: one JSON object per line, one row per step, and one (`behaviour`) where behaviour was measured."""

import errno
import json
import math
import os
import stat
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import CheckpointError, ResourceError
from holdfast.core.files import write_bytes


class EventLog(AbstractContextManager["EventLog"]):
    """Appends rows to a JSON-lines file, each handed to the operating system before `append` returns.

    The lines are strict JSON: a non-finite float is written as null, so that every reader accepts the file. A row
    reaches the file whole or is removed again, except when the process is killed inside the write; such a torn last
    line is ignored by `read` and dropped when the log is next opened. A link is not followed, and a file that no log
    can have become is left as it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = self._open()

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(self.path, flags, 0o600)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise self._foreign("is a symbolic link") from error
        try:
            os.ftruncate(descriptor, self._length_of_rows(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _length_of_rows(self, descriptor: int) -> int:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise self._foreign("is no regular file")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read()
        if data and b"\n" not in data:
            raise self._foreign(f"has {len(data)} bytes and not one whole line")
        if data and _object(data.partition(b"\n")[0]) is None:
            raise self._foreign("begins with a line that is no JSON object")
        return data.rfind(b"\n") + 1

    def _foreign(self, why: str) -> CheckpointError:
        what = f"{self.path} {why}, expected an event log (one JSON object a line) or no file"
        return CheckpointError(what, remedy="move it away, or choose another output_dir")

    def append(self, row: Mapping[str, object]) -> None:
        line = json.dumps(_strict(row), allow_nan=False).encode() + b"\n"
        size = os.fstat(self._descriptor).st_size
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            os.ftruncate(self._descriptor, size)
            raise self._refused(error) from error

    def sync(self) -> None:
        """Flush to disk; called before a checkpoint is committed, so that its rows survive a power cut."""
        os.fsync(self._descriptor)

    def truncate_after(self, step: int) -> None:
        """Atomically drop the rows whose `step` is greater, so that a resumed run logs no step twice.

        Rows without a step are kept; kept lines keep their bytes.
        """
        lines = _whole_lines(self.path)
        kept = [line for line, row in zip(lines, read(self.path), strict=True) if row.get("step", step) <= step]
        if len(kept) < len(lines):
            try:
                write_bytes(self.path, b"".join(kept))
            except OSError as error:
                raise self._refused(error) from error
            os.close(self._descriptor)
            self._descriptor = self._open()

    def _refused(self, error: OSError) -> ResourceError:
        return ResourceError(f"{self.path} cannot be written: {error}", remedy="free disk space, then resume")

    def close(self) -> None:
        os.close(self._descriptor)

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path) -> list[dict[str, Any]]:
    """All rows of an event log; a torn last line is ignored."""
    rows = []
    for number, line in enumerate(_whole_lines(path), start=1):
        if (row := _object(line)) is None:
            remedy = "delete the damaged line, or restore the file from a backup"
            raise CheckpointError(f"{path}:{number}: not a JSON object ({len(line.strip())} bytes)", remedy=remedy)
        rows.append(row)
    return rows


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _whole_lines(path: Path) -> list[bytes]:
    data = path.read_bytes()
    return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)


def _strict(value: object) -> object:
    """`value` with numpy numbers as Python numbers and non-finite floats as None."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value
