from __future__ import annotations

import pytest
from tests.unit.fused import simulated_cuda


@pytest.fixture
def cuda(monkeypatch):
    """A GPU that records on the CPU."""
    return simulated_cuda.install(monkeypatch)
