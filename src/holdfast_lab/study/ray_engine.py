"""A study's work as Ray tasks: the same worker processes, on whatever machines the cluster has.

Every machine must see the study's folder under the same path and have holdfast installed. `RAY_ADDRESS` names a
running cluster; without it Ray is started on this machine.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from holdfast.core.errors import ResourceError
from holdfast_lab.study.engine import launch, stop_workers
from holdfast_lab.study.folder import LOG

LOST = -9  # exit code of work whose machine or Ray worker was lost: as if killed


class RayEngine:
    """Runs node files as Ray tasks, `workers` of them to a GPU; without GPUs, `workers` to a machine."""

    def __init__(self, workers: int, *, cpus: int | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            raise ResourceError(
                "engine: ray needs the package ray, which is not installed",
                remedy="pip install 'holdfast[ray]', or set engine: local",
            ) from error
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._ray: Any = ray
        self._owns = not ray.is_initialized()
        if self._owns:
            local = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": cpus, "include_dashboard": False}
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
        """Submit the worker of a node file."""
        settings = {name: value for name, value in os.environ.items() if name.startswith("HOLDFAST_")}
        self._running[self._task.remote(str(node), str(Path.cwd()), settings)] = id_

    def ended(self) -> list[tuple[str, int]]:
        """Id and exit code of those that ended since the last call."""
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
