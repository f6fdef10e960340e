"""One of two ranks killed while a checkpoint is written: resumed to the same bits; one process alone is refused.

The part of the sharding matrix (`make test-sharding`) that the suite has.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from holdfast.core.errors import CheckpointError
from tests import forkserver
from tests.distributed.worker import without_time
from tests.sharding import cells

ENGINE, CELL, KILL = "ddp", "lora two_pass", "save"


def finish(folder: Path) -> None:
    """The same run unbroken, then the killed one."""
    cells.begin(ENGINE)
    whole = cells.trained(cells.saving(folder, folder / "whole", ENGINE, CELL))
    resumed = cells.trained(cells.saving(folder, folder / f"{KILL} {CELL}", ENGINE, CELL), resume=True)
    torch.save({"whole": whole, "resumed": resumed}, folder / f"{cells.rank()}.pt")


def test_a_killed_rank(tmp_path):
    log = tmp_path / "log"
    codes = forkserver.ended(cells.killed, tmp_path, tmp_path, ENGINE, CELL, KILL, log=log)
    assert codes[-1] == -signal.SIGKILL, log.read_text()[-3000:]
    assert all(codes)
    forkserver.ranks(finish, tmp_path, log=log)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        whole, resumed = found["whole"], found["resumed"]
        assert [row["step"] for row in resumed["rows"]] == [3, 4, 5]  # the checkpoint of step 4 was not finished
        assert without_time(resumed["rows"]) == without_time(whole["rows"][2:])
        assert any(row["event"] != "inactive" for row in resumed["rows"])
        assert all(torch.equal(resumed["weights"][key], value) for key, value in whole["weights"].items())
    with pytest.raises(CheckpointError, match="processes: stored 2, current 1"):
        cells.saving(tmp_path, tmp_path / "whole", ENGINE, CELL).train(resume_from_checkpoint=True)
