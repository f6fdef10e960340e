"""Where a study's work runs: an engine starts node files in worker processes and says when they end."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Protocol

from holdfast.study import process
from holdfast.study.folder import LOG

GRACE = 60.0
"""Seconds in which an interrupted training run may save."""


class Engine(Protocol):
    """Runs node files side by side."""

    @property
    def capacity(self) -> int:
        """How many may run at a time."""
        ...

    def start(self, id_: str, node: Path) -> None:
        """Start the worker of a node file."""
        ...

    def ended(self) -> list[tuple[str, int]]:
        """Id and exit code of those that ended since the last call; does not wait."""
        ...

    def stop(self) -> None:
        """End all that still run, and give everything back."""
        ...


class LocalEngine:
    """Worker processes on this machine.

    With several GPUs each worker sees one of them, the one with the fewest workers: a trainer that sees all would
    spread its batch over them.
    """

    def __init__(self, workers: int, *, gpus: list[str] | None = None) -> None:
        self.capacity = workers
        self._gpus = visible_gpus() if gpus is None else gpus
        self._running: dict[str, tuple[subprocess.Popen[bytes], str | None]] = {}

    def start(self, id_: str, node: Path) -> None:
        """Start the worker of a node file."""
        gpu = self._free_gpu()
        env = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        self._running[id_] = (process.launch(node, node.parent / LOG, env=env), gpu)

    def ended(self) -> list[tuple[str, int]]:
        """Id and exit code of those that ended since the last call."""
        found = [(id_, code) for id_, (worker, _) in self._running.items() if (code := worker.poll()) is not None]
        for id_, _ in found:
            worker, _ = self._running.pop(id_)
            if worker.stdin is not None:
                worker.stdin.close()
        return found

    def stop(self) -> None:
        """End all workers; a training run saves a checkpoint first."""
        process.stop([worker for worker, _ in self._running.values()], grace=GRACE)
        self._running.clear()

    def _free_gpu(self) -> str | None:
        if len(self._gpus) < 2:
            return None
        used = [gpu for _, gpu in self._running.values()]
        return min(self._gpus, key=used.count)


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` spells them."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu for gpu in named.split(",") if gpu]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]
