"""One launch per engine for all tests of this folder; their processes store what the tests look at."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from tests import forkserver
from tests.distributed import fused_cases, worker

PROCESSES = 2


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Path:
    """The folder of all runs, the same for every worker of a parallel test session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "distributed"
    folder.mkdir(exist_ok=True)
    return folder


def launched(folder: Path, engine: str) -> list[dict[str, Any]]:
    """What each rank saw; the processes are started once, by the first test that asks."""
    stored = [folder / f"{engine}-{rank}.pt" for rank in range(PROCESSES)]
    with FileLock(folder / "launch.lock"):
        if not stored[-1].exists():
            forkserver.ranks(worker.main, folder, engine, log=folder / f"{engine}.log", processes=PROCESSES)
    return [torch.load(path, weights_only=True) for path in stored]


@pytest.fixture(scope="session")
def ddp(runs) -> list[dict[str, Any]]:
    return launched(runs, "ddp")


@pytest.fixture(scope="session")
def fsdp2(runs) -> list[dict[str, Any]]:
    return launched(runs, "fsdp2")


def _made_once(stored: Path, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """What `make` gives for a folder, computed by the first of the test processes that asks."""
    with FileLock(stored.with_suffix(".lock")):
        if not stored.exists():
            torch.save(make(stored.with_suffix("")), stored)
    return torch.load(stored, weights_only=True)


@pytest.fixture(scope="session")
def one_process(runs) -> dict[str, Any]:
    """The reference: the same problems without any process group."""
    return _made_once(runs / "one.pt", worker.in_one_process)


@pytest.fixture(scope="session")
def one_process_fused(runs) -> dict[str, Any]:
    """The reference of the fused layouts."""
    return _made_once(runs / "one-fused.pt", fused_cases.fused)


@pytest.fixture
def engine(request):
    """The ranks' records of the engine that the test names."""
    found = request.getfixturevalue(request.param)
    return found if isinstance(found, list) else [found]
