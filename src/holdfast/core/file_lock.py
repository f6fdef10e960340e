"""Locks between processes, by `filelock`: the operating system frees them when a process dies, SIGKILL included."""

import json
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from holdfast.core.errors import CheckpointError, ConfigError, ResourceError

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
        if error.filename is None:  # opening names its file, locking does not
            raise ResourceError(
                f"{place} cannot be locked: {error.strerror}",
                remedy="name a place on a local disk (--output, --ledger)",
            ) from error
        raise ConfigError(
            f"{place.parent} cannot be written: {error.strerror}",
            remedy="make the folder writable, or name another place",
        ) from error
    try:
        yield
    finally:
        _unlink(place)
        lock.release()


def _unlink(lock: Path) -> None:
    with suppress(FileNotFoundError, PermissionError):  # Windows keeps an open file, and filelock removes it there
        lock.unlink()


class RunLock:
    """Context manager that holds the lock of a run folder: one process at a time writes it.

    The pid and host in the file are for the message, and for shared disks whose locks other hosts do not see. A file
    left by a dead process of this host is taken over with a log line. One left by another host is refused even when it
    can be locked, because the lock may not reach that host. A folder that the lock made and that is empty at the end
    is removed: only an empty one, so that nothing of another process is ever deleted.

    Attributes:
        made: whether this lock made the folder.
    """

    def __init__(self, folder: Path, *, log: Callable[[str], None] | None = None) -> None:
        self.path = folder.absolute() / LOCK_FILE
        self.made = False
        self._log = log or logger.warning
        self._me = {"pid": os.getpid(), "host": socket.gethostname()}
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
            except FileNotFoundError as error:
                if attempt == ATTEMPTS:  # else the former holder removed the empty folder between the two calls
                    raise self._unwritable(error) from error
            except OSError as error:
                if error.filename is None:
                    raise ResourceError(
                        f"{self.path} cannot be locked: {error}",
                        remedy="put output_dir on a file system that supports locks",
                    ) from error
                raise self._unwritable(error) from error
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
            if holder["host"] != self._me["host"]:
                raise self._in_use(holder)
            self._log(f"{self.path}: stale lock of process {holder['pid']}, which is gone, taken over")
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, json.dumps(self._me).encode())

    def _in_use(self, holder: dict[str, Any] | None) -> CheckpointError:
        who = _words(holder) if holder else "another process"
        return CheckpointError(
            f"{self.path.parent} is in use by {who}",
            remedy=f"wait for it to end or choose another output_dir; if it is dead, delete {self.path}",
        )

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(f"the run folder cannot be written: {error}", remedy="choose another output_dir")


def writer_of(folder: Path) -> str | None:
    """The process that writes a run folder, in words; None where none does, as far as its lock file tells.

    It only reads: who tried the lock would stand in the way of a run that begins now. So the file of a process that was
    killed counts until its number is free; on Windows, which cannot ask, until the next run.
    """
    try:
        holder = _holder((folder / LOCK_FILE).read_bytes())
    except OSError:
        return None
    if holder is None:
        return None
    if holder["host"] == socket.gethostname() and os.name != "nt":
        try:
            os.kill(holder["pid"], 0)
        except ProcessLookupError:
            return None
        except PermissionError:  # another user's: it lives
            pass
    return _words(holder)


def _words(holder: dict[str, Any]) -> str:
    return f"process {holder['pid']} on {holder['host']}"


def _holder(content: bytes) -> dict[str, Any] | None:
    try:
        holder = json.loads(content)
        return {"pid": int(holder["pid"]), "host": str(holder["host"])}
    except (ValueError, TypeError, KeyError):
        return None
