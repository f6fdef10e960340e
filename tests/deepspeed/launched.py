"""A run file under `accelerate launch` itself, with examples/launch/zero2.yaml: what one process trains."""

from __future__ import annotations

import pytest
import torch

from tests import rounding
from tests.distributed.test_launch_configs import adapter, write_run_file
from tests.sharding.launched import alone, launch

pytest.importorskip("deepspeed", reason="make test-deepspeed installs it")
__all__ = ["alone"]


@pytest.mark.parametrize("processes", [2, 4])
def test_accelerate_launch_trains_what_one_process_does(tmp_path, alone, processes):
    path = write_run_file(tmp_path / "run", processes)
    ranks = launch(path, "zero2", processes)
    assert [(rank["world"], rank["zero"]) for rank in ranks] == [(processes, True)] * processes
    expected, found = adapter(alone), adapter(path)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=rounding.FLOAT32, atol=rounding.FLOAT32)
