"""Two DDP processes give every registered defense the gradients and the weights of one process on the same rows."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from filelock import FileLock

from tests import forkserver
from tests.contracts import ddp_worker
from tests.contracts.defense_cases import CASES, Case, largest_difference
from tests.unit.trainers.building import same

PROCESSES = 2
TOLERANCE = 1e-9  # float64, so that what differs is not rounding, which Booster multiplies by 10 in float32


@pytest.fixture(scope="session")
def launched(request, tmp_path_factory) -> list[dict[str, Any]]:
    """What each rank saw of every selected case: one launch for the whole session, also of a parallel one."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "defense-contract"
    folder.mkdir(exist_ok=True)
    stored = [folder / f"rank-{rank}.pt" for rank in range(PROCESSES)]
    items = [item for item in request.session.items if "ddp_case" in getattr(item, "fixturenames", ())]
    wanted = [str(item.callspec.params["ddp_case"]) for item in items]
    with FileLock(folder / "launch.lock"):
        if not all(path.exists() for path in stored):
            log = folder / "log"
            forkserver.ranks(ddp_worker.main, folder, sorted(set(wanted)), log=log, processes=PROCESSES)
    return [torch.load(path, weights_only=True) for path in stored]


@pytest.fixture(scope="module", params=CASES, ids=str)
def ddp_case(request) -> Case:
    return request.param


def test_two_processes_are_one(ddp_case, launched, tmp_path):
    ranks = [found[str(ddp_case)] for found in launched]
    assert [rank["failed"] for rank in ranks if "failed" in rank] == []
    first, second = ranks
    assert same(first["weights"], second["weights"])
    assert all(torch.equal(a, b) for a, b in zip(first["gradients"], second["gradients"], strict=True))
    expected = ddp_worker.gradients(tmp_path, ddp_case)
    for found, one in zip(first["gradients"], expected["gradients"], strict=True):
        assert found.dtype == torch.float64
        assert float((found - one).norm()) <= TOLERANCE * float(one.norm())
    assert largest_difference(first["weights"], expected["weights"]) <= TOLERANCE
