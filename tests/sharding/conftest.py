"""The runs of the matrix, each launched by the first test that asks; the largest differences are listed at the end."""

from __future__ import annotations

import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forkserver, tiny
from tests.sharding import cells

DIFFERENCES: dict[str, dict[str, float]] = {}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Largest relative difference to one process, by layout and quantity."""
    for name, found in DIFFERENCES.items():
        terminalreporter.write_line(f"{name}: " + ", ".join(f"{key} {value:.1e}" for key, value in found.items()))


class Matrix:
    """Launches, and what their ranks stored."""

    def __init__(self, root: Path) -> None:
        self.root = root
        tiny.saved(root / cells.BASE)
        self.unbroken = cache(self._unbroken)
        self.continued = cache(self._continued)

    def folder(self, engine: str, count: int) -> Path:
        made = self.root / f"{engine}-{count}"
        made.mkdir(exist_ok=True)
        return made

    def _stored(self, folder: Path, what: str, count: int) -> list[dict[str, Any]]:
        return [torch.load(folder / f"{what}-{rank}.pt", weights_only=True) for rank in range(count)]

    def _unbroken(self, engine: str, count: int) -> list[dict[str, Any]]:
        folder = self.folder(engine, count)
        log, arguments = folder / "unbroken.log", (self.root, folder, engine)
        if count == 1:  # the oracle: no process group at all
            assert forkserver.finished(forkserver.started(cells.unbroken, *arguments, log=log)) == 0, log.read_text()
        else:
            forkserver.ranks(cells.unbroken, *arguments, log=log, processes=count)
        return self._stored(folder, "unbroken", count)

    def _continued(self, engine: str, count: int) -> list[dict[str, Any]]:
        """Kill every run once, then resume them all."""
        folder, others = self.folder(engine, count), {}
        for other in (1, 2, 4) if engine == "ddp" else (2, 4):
            self.unbroken(engine, other)
            others[other] = self.folder(engine, other)
        for cell in cells.CELLS[engine]:
            for kill in cells.KILLS:
                log = folder / f"killed {kill} {cell}.log"
                codes = forkserver.ended(cells.killed, self.root, folder, engine, cell, kill, log=log, processes=count)
                assert codes[-1] == -signal.SIGKILL, log.read_text()[-6000:]
                assert all(codes), codes  # the others saw the connection break, or were taken down
        log = folder / "continued.log"
        forkserver.ranks(cells.continued, self.root, folder, engine, others, log=log, processes=count)
        return self._stored(folder, "continued", count)


@pytest.fixture(scope="session")
def matrix(tmp_path_factory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix"))
