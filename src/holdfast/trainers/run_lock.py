"""One process at a time writes a run folder.

The lock is `flock` on `run.lock`, so that the kernel frees it when the process dies, SIGKILL included. The
pid and host in the file are for the message, and for shared disks whose locks other hosts do not see.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from holdfast.core.errors import CheckpointError, ConfigError, ResourceError

LOCK_FILE = "run.lock"
_BUSY = (errno.EAGAIN, errno.EACCES)
_HELD: set[int] = set()


def _forget_in_child() -> None:
    """Close inherited locks: a forked data worker that outlives its parent must not keep the run locked."""
    for descriptor in _HELD:
        os.close(descriptor)
    _HELD.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class RunLock:
    """Context manager that holds the lock of a run folder.

    A file left by a dead process of this host is taken over with a log line. One left by another host is
    refused even when it can be locked, because `flock` may not reach that host. A folder that the lock made and that
    is empty at the end is removed: only an empty one, so that nothing of another process is ever deleted.

    Args:
        folder: the run folder; created when absent.
        log: receives the line about a lock that was taken over.

    Attributes:
        made: whether this lock made the folder.

    Raises:
        CheckpointError: on entry, when another process holds the lock (pid and host are named).
        ConfigError: on entry, when the folder cannot be written.
        ResourceError: on entry, when the file system has no locks.
    """

    def __init__(self, folder: Path, *, log: Callable[[str], None] | None = None) -> None:
        self.path = folder.absolute() / LOCK_FILE
        self._log = log or logging.getLogger(__name__).warning
        self._descriptor: int | None = None
        self.made = False

    def __enter__(self) -> RunLock:
        descriptor = self._lock()
        try:
            self._take_over(_holder(descriptor))
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        _HELD.add(descriptor)
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A forked child that unwinds this frame holds nothing and must not delete its parent's file.
        if self._descriptor is not None and self._descriptor in _HELD:
            if self._names(self._descriptor):
                self.path.unlink()
            if self.made:
                with suppress(OSError):  # not empty: it holds a run, or the next process's lock
                    self.path.parent.rmdir()
            _HELD.discard(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = None

    def _lock(self) -> int:
        """Open and lock the file; again when it was unlinked in between, since that lock guards nothing."""
        while True:
            descriptor = self._open()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = _holder(descriptor)
                os.close(descriptor)
                if error.errno in _BUSY:
                    raise self._in_use(holder) from error
                raise ResourceError(
                    f"{self.path} cannot be locked: {error}",
                    remedy="put output_dir on a file system that supports flock",
                ) from error
            if self._names(descriptor):
                return descriptor
            os.close(descriptor)

    def _names(self, descriptor: int) -> bool:
        """Whether the path still leads to the file that `descriptor` has open."""
        try:
            return os.path.samestat(os.fstat(descriptor), self.path.stat())
        except FileNotFoundError:
            return False

    def _open(self, attempts: int = 10) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._make_folder()
            return os.open(self.path, flags, 0o600)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and attempts > 1:
                return self._open(attempts - 1)  # its former holder removed the empty folder between the two calls
            raise ConfigError(
                f"the run folder cannot be written: {error}", remedy="choose another output_dir"
            ) from error

    def _make_folder(self) -> None:
        folder = self.path.parent
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
            self.made = True
        except FileExistsError:
            self.made = False
            if not folder.is_dir():
                raise

    def _take_over(self, holder: dict[str, Any] | None) -> None:
        if holder is None:
            return
        if holder["host"] != socket.gethostname():
            raise self._in_use(holder)
        self._log(f"{self.path}: stale lock of process {holder['pid']}, which is gone, taken over")

    def _in_use(self, holder: dict[str, Any] | None) -> CheckpointError:
        who = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
        return CheckpointError(
            f"{self.path.parent} is in use by {who}",
            remedy=f"wait for it to end or choose another output_dir; if it is dead, delete {self.path}",
        )


def _holder(descriptor: int) -> dict[str, Any] | None:
    """Pid and host in the file; None when it is empty or was cut off while being written."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return {"pid": int(holder["pid"]), "host": str(holder["host"])}
    except (ValueError, TypeError, KeyError):
        return None
