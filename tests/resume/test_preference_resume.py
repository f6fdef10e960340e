"""DPO and GRPO, resumed after a save, are bit for bit the run that did not die; what cannot be is refused by name."""

from __future__ import annotations

import pytest
import torch
from tests.distributed.worker import without_time
from tests.resume.test_resume_exact import DieAfterSave, DiedError
from tests.unit.trainers import preferring

from holdfast.core.errors import CheckpointError
from holdfast.core.event_log import read

CASES = {
    "dpo": ("dpo", {}),
    "dpo, adapter that goes on training": ("dpo", {"model": preferring.tiny.continued, "own": {"peft_config": None}}),
    # Replies of a generation last for four steps, and the checkpoint lies in the midst of them.
    "grpo": (
        "grpo",
        {"num_iterations": 2, "steps_per_generation": 4, "use_adaptive_entropy": True, "entropy_target": 9.0},
    ),
}


def run(method, folder, name, *, resume=None, **options):
    start = options.pop("model", None)
    trainer = preferring.safe(method, folder, start and start(), name=name, constraint=preferring.TIGHT, **options)
    trainer.train(resume_from_checkpoint=resume)
    rows = without_time(read(trainer.run_dir / "events.jsonl"))
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}, rows


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_bit_identical(tmp_path, case):
    method, options = CASES[case]
    expected, rows = run(method, tmp_path, "whole", **options)
    saving = {**options, "save_strategy": "steps", "save_steps": 2}
    dying = {**(saving.pop("own", {})), "callbacks": [DieAfterSave(2)]}
    with pytest.raises(DiedError):
        run(method, tmp_path, "died", own=dying, **saving)
    torch.manual_seed(123)  # a new process starts from any state
    found, again = run(method, tmp_path, "died", resume=True, **options)
    assert "active" in {row["event"] for row in rows[2:]}
    assert again == rows
    for name, value in expected.items():
        assert torch.equal(value, found[name]), f"{name} differs by {(value - found[name]).abs().max()}"


def test_a_reference_that_moves_cannot_be_resumed(tmp_path):
    options = {"own": {"peft_config": None}, "sync_ref_model": True, "max_steps": 2}
    run("dpo", tmp_path, "run", save_strategy="steps", save_steps=1, **options)
    with pytest.raises(CheckpointError, match="a run with sync_ref_model cannot be resumed: no checkpoint has the ref"):
        run("dpo", tmp_path, "run", resume=True, **options)
