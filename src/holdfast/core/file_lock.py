"""Locks between processes, by `filelock`: the operating system frees them when a process dies, SIGKILL included."""

import json
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from holdfast.core.errors import CheckpointError, ConfigError, HoldfastError, ResourceError

LOCK_FILE = "run.lock"
ATTEMPTS = 10

logger = logging.getLogger(__name__)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time reads, changes and writes a shared file; others wait for one write, or for one audit.

    The lock is a file beside `path`, which is removed at the end.
    """
    place = path.with_name(f".{path.name}.lock")
    lock = FileLock(place, mode=0o600, fallback_to_soft=False)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            logger.info("waiting for %s: another process works on it", path)
            lock.acquire()
    except OSError as error:
        raise _refused(place, error, "--output, --ledger") from error
    try:
        yield
    finally:
        _unlink(place)
        lock.release()


def _refused(lock: Path, error: OSError, setting: str) -> HoldfastError:
    if error.filename is None:  # opening names its file, locking does not
        remedy = f"name a place on a local disk, whose file system supports locks ({setting})"
        return ResourceError(f"{lock} cannot be locked: {error.strerror or error}", remedy=remedy)
    return ConfigError(
        f"{lock.parent} cannot be written: {error}", remedy="make the folder writable, or name another place"
    )


def _unlink(lock: Path) -> None:
    with suppress(FileNotFoundError, PermissionError):  # Windows keeps an open file, and filelock removes it there
        lock.unlink()


class RunLock:
    """Context manager that holds the lock of a run folder: one process at a time writes it.

    The pid and host in the file are for the message, and for shared disks whose locks other hosts do not see. A file
    left by a dead process of this host is taken over with a log line. One left by another host is refused even when it
    can be locked, because the lock may not reach that host. At the end an empty folder that the lock `made` is removed.
    """

    def __init__(self, folder: Path, *, log: Callable[[str], None] = logger.warning) -> None:
        self.path = folder.absolute() / LOCK_FILE
        self.made = False
        self._log = log
        self._me = (os.getpid(), socket.gethostname())
        self._lock = FileLock(
            self.path, mode=0o600, thread_local=False, blocking=False, fallback_to_soft=False, on_acquired=self._sign
        )

    def __enter__(self) -> Self:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._make_folder()
                self._lock.acquire()
                return self
            except Timeout as error:
                with suppress(FileNotFoundError):  # its former holder removed it just now: try again
                    raise self._in_use(_holder(self.path.read_bytes())) from error
            except OSError as error:  # the former holder may have removed the empty folder between two of the calls
                if not isinstance(error, FileNotFoundError | FileExistsError) or attempt == ATTEMPTS:
                    raise _refused(self.path, error, "output_dir") from error
        raise self._in_use(None)

    def __exit__(self, *_: object) -> None:
        # A forked child that unwinds this frame holds nothing and must not delete its parent's file.
        if not self._lock.is_locked:
            return
        with suppress(FileNotFoundError):
            if _holder(self.path.read_bytes()) == self._me:
                _unlink(self.path)
        if self.made:
            with suppress(OSError):  # not empty: it holds a run, or the next process's lock
                self.path.parent.rmdir()
        self._lock.release()

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

    def _sign(self, descriptor: int) -> None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        if (holder := _holder(os.read(descriptor, 4096))) is not None:
            if holder[1] != self._me[1]:
                raise self._in_use(holder)
            self._log(f"{self.path}: stale lock of process {holder[0]}, which is gone, taken over")
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, json.dumps(dict(zip(("pid", "host"), self._me, strict=True))).encode())

    def _in_use(self, holder: tuple[int, str] | None) -> CheckpointError:
        who = "process {} on {}".format(*holder) if holder else "another process"
        return CheckpointError(
            f"{self.path.parent} is in use by {who}",
            remedy=f"wait for it to end or choose another output_dir; if it is dead, delete {self.path}",
        )


def writer_of(folder: Path) -> str | None:
    """The process that writes a run folder, in words; None where none does, as far as its lock file tells.

    It only reads: who tried the lock would stand in the way of a run that begins now. So the file of a process that was
    killed counts until its number is free; on Windows, which cannot ask, until the next run.
    """
    try:
        if (holder := _holder((folder / LOCK_FILE).read_bytes())) is None:
            return None
        if holder[1] == socket.gethostname() and os.name != "nt":
            with suppress(PermissionError):  # another user's: it lives
                os.kill(holder[0], 0)
    except OSError:  # no file, or no such process
        return None
    return "process {} on {}".format(*holder)


def _holder(content: bytes) -> tuple[int, str] | None:
    """Process and host."""
    try:
        holder = json.loads(content)
        return int(holder["pid"]), str(holder["host"])
    except (ValueError, TypeError, KeyError):
        return None
