"""Where a study's work runs: an engine starts node files in worker processes and says when they end.

Workers cannot outlive the process that started them, kill -9 included. With Ray the same worker processes run on
whatever machines the cluster has: every machine must see the study's folder under the same path and have holdfast
installed. `RAY_ADDRESS` names a running cluster; without it Ray is started on this machine.
"""

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core.errors import ResourceError
from holdfast_lab.study.folder import LOG

PARENT = "HOLDFAST_STUDY_PARENT"
SETTINGS = {
    "OMP_WAIT_POLICY": "PASSIVE",  # idle threads that spin starve the other workers
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # several workers on one GPU leave each other room
}
_PR_SET_PDEATHSIG = 1
GRACE = 60.0  # seconds in which an interrupted training run may save
LOST = -9  # exit code of work whose machine or Ray worker was lost: as if killed


class LocalEngine:
    """Worker processes on this machine, at most `capacity` at a time.

    With several GPUs each worker sees one of them, the one with the fewest workers: a trainer that sees all would
    spread its batch over them.
    """

    def __init__(self, workers: int, *, gpus: list[str] | None = None) -> None:
        self.capacity = workers
        self._gpus = visible_gpus() if gpus is None else gpus
        self._running: dict[str, tuple[subprocess.Popen[bytes], str | None]] = {}

    def start(self, id_: str, node: Path) -> None:
        used = [gpu for _, gpu in self._running.values()]
        gpu = min(self._gpus, key=used.count) if len(self._gpus) > 1 else None
        env = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        self._running[id_] = (launch(node, node.parent / LOG, env=env), gpu)

    def ended(self) -> list[tuple[str, int]]:
        """Id and exit code of those that ended since the last call; does not wait."""
        found = [(id_, code) for id_, (worker, _) in self._running.items() if (code := worker.poll()) is not None]
        for id_, _ in found:
            if (pipe := self._running.pop(id_)[0].stdin) is not None:
                pipe.close()
        return found

    def stop(self) -> None:
        """End all workers; a training run saves a checkpoint first."""
        stop_workers([worker for worker, _ in self._running.values()], grace=GRACE)
        self._running.clear()


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` spells them."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu for gpu in named.split(",") if gpu]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


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
            [sys.executable, "-m", "holdfast_lab.study.worker", str(node)], stdin=subprocess.PIPE, stdout=descriptor,
            stderr=descriptor, env={**os.environ, **SETTINGS, **(env or {}), PARENT: str(os.getpid())}, cwd=folder,
            start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(descriptor)


def stop_workers(processes: list[subprocess.Popen[bytes]], *, grace: float) -> None:
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

    def end_with_stdin() -> None:
        while os.read(0, 1):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_stdin, daemon=True).start()


class RayEngine:
    """The same as Ray tasks, `workers` of them to a GPU; without GPUs, `workers` to a machine."""

    def __init__(self, workers: int) -> None:
        try:
            import ray
        except ImportError as error:
            what = "engine: ray needs the package ray, which is not installed"
            raise ResourceError(what, remedy="pip install 'holdfast-llm[ray]', or set engine: local") from error
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._ray: Any = ray
        self._owns = not ray.is_initialized()
        if self._owns:
            local = {} if os.environ.get("RAY_ADDRESS") else {"include_dashboard": False}
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **local)
        gpus = int(ray.cluster_resources().get("GPU", 0))
        machines = sum(1 for machine in ray.nodes() if machine["Alive"])
        self.capacity = workers * max(gpus or machines, 1)
        # A node that fails is reported, never silently run again.
        self._task = ray.remote(_run_worker).options(
            num_cpus=1, num_gpus=1 / workers if gpus else 0, max_retries=0, retry_exceptions=False
        )
        self._running: dict[Any, str] = {}

    def start(self, id_: str, node: Path) -> None:
        settings = {name: value for name, value in os.environ.items() if name.startswith("HOLDFAST_")}
        self._running[self._task.remote(str(node), str(Path.cwd()), settings)] = id_

    def ended(self) -> list[tuple[str, int]]:
        if not self._running:
            return []
        ready, _ = self._ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
        return [(self._running.pop(task), self._exit_code(task)) for task in ready]

    def _exit_code(self, task: Any) -> int:
        try:
            return int(self._ray.get(task))
        except self._ray.exceptions.RayTaskError as error:  # the task could not even start a worker
            raise ResourceError(
                f"a machine of the Ray cluster cannot start work: {type(error.cause).__name__}",
                remedy="put output_dir on a disk that all machines share under one path, and install holdfast on each",
            ) from error
        except self._ray.exceptions.RayError:
            return LOST

    def stop(self) -> None:
        """End all tasks; their worker processes die with them."""
        for task in self._running:
            self._ray.cancel(task, force=True)
        self._running.clear()
        if self._owns:
            self._ray.shutdown()


Engine = LocalEngine | RayEngine


def _run_worker(node: str, folder: str, settings: dict[str, str]) -> int:
    """The body of a task: a process of its own, as on one machine, so that its memory is given back whole."""
    file = Path(node)
    if not file.is_file():
        raise FileNotFoundError(node)
    worker = launch(file, file.parent / LOG, env=settings, folder=folder if Path(folder).is_dir() else None)
    try:
        return worker.wait()
    finally:
        stop_workers([worker], grace=0)
