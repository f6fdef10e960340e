"""One process at a time reads, changes and writes a shared file."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.core.errors import ConfigError, ResourceError

logger = logging.getLogger(__name__)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold `flock` on a file beside `path`; waits for others, who hold it for one write, or for one audit.

    The kernel frees the lock when a process dies. The lock file is removed at the end, so one that was waited for may
    be gone: then its lock guards nothing, and the next is taken.

    Raises:
        ConfigError: the folder cannot be written.
        ResourceError: the file system has no locks.
    """
    lock = path.with_name(f".{path.name}.lock")
    descriptor = _take(lock, path)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _take(lock: Path, path: Path) -> int:
    told = False
    while True:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{lock.parent} cannot be written: {error.strerror}",
                remedy="make the folder writable, or name another place",
            ) from error
        try:
            if not told and _taken(descriptor):
                logger.info("waiting for %s: another process works on it", path)
                told = True
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(descriptor), lock.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        except OSError as error:
            os.close(descriptor)
            raise ResourceError(
                f"{lock} cannot be locked: {error.strerror}", remedy="name a place on a local disk (--output, --ledger)"
            ) from error
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    """Whether somebody else holds the lock; takes it where nobody does."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
