"""Worker processes that cannot outlive the one that started them, kill -9 included."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

PARENT = "HOLDFAST_STUDY_PARENT"
SETTINGS = {
    "OMP_WAIT_POLICY": "PASSIVE",  # idle threads that spin starve the other workers
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # several workers on one GPU leave each other room
}
_PR_SET_PDEATHSIG = 1


def launch(
    node: Path, log: Path, *, env: Mapping[str, str] | None = None, folder: str | None = None
) -> subprocess.Popen[bytes]:
    """Start the worker of a node file in `folder`; its output goes to `log`, which only its owner can read.

    The worker leads a process group of its own, so that Ctrl-C reaches it only through the scheduler. It watches the
    pipe that is its standard input: its end says that the parent is gone.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(  # noqa: S603  (our own module, no shell)
            [sys.executable, "-m", "holdfast.study.worker", str(node)],
            stdin=subprocess.PIPE,
            stdout=descriptor,
            stderr=descriptor,
            env={**os.environ, **SETTINGS, **(env or {}), PARENT: str(os.getpid())},
            cwd=folder,
            start_new_session=True,
        )
    finally:
        os.close(descriptor)


def stop(processes: list[subprocess.Popen[bytes]], *, grace: float) -> None:
    """Ask workers to end (a training run saves first); after `grace` seconds, or once they ended, kill what is left."""
    for process in processes:
        process.terminate()  # not its children: a run whose data workers die fails instead of saving
    deadline = time.monotonic() + grace
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def end_with_parent() -> None:
    """Make this process end when the one that launched it ends; called first thing in a worker."""
    parent = int(os.environ.pop(PARENT, "0"))
    if not parent:  # started by hand
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was told
        os.killpg(0, signal.SIGKILL)
    threading.Thread(target=_end_with_stdin, daemon=True).start()


def _end_with_stdin() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)
