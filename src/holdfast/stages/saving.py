"""Writing what a run leaves, so that a full disk costs nothing but the time since its last checkpoint."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from holdfast.core.errors import ResourceError
from holdfast.core.files import fsync_path
from holdfast.core.ranks import barrier, rank
from holdfast.trainers.checkpoint_store import CheckpointStore

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def disk_errors(what: str, checkpoints: Path) -> Iterator[None]:
    """Turn a refused write into a `ResourceError` that names the checkpoint with which the run goes on.

    safetensors reports a full disk as its own error type, which is not an `OSError`.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno not in DISK:
            raise
        committed = CheckpointStore(checkpoints).checkpoints()
        kept = f"{committed[-1]} is kept" if committed else "no checkpoint was saved (train.save_strategy)"
        goes_on = "then --resume goes on from there" if committed else "then run it again"
        raise ResourceError(
            f"{what} could not be written: {error}; {kept}", remedy=f"free disk space, {goes_on}"
        ) from error


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A folder to write into, which takes the name `final` once it is complete; every process must enter.

    A reader sees the former folder, or none, or the new one, never a part of it. Where writing fails nothing is left.
    """
    staged = final.with_name(f".tmp-{final.name}")
    if rank() == 0:
        shutil.rmtree(staged, ignore_errors=True)
    barrier()
    try:
        yield staged
    except BaseException:
        if rank() == 0:
            shutil.rmtree(staged, ignore_errors=True)
        raise
    barrier()
    if rank() == 0:
        for path in (*staged.rglob("*"), staged):
            fsync_path(path)
        if final.is_symlink():
            final.unlink()
        elif final.exists():
            shutil.rmtree(final)
        staged.rename(final)
        fsync_path(final.parent)
    barrier()
