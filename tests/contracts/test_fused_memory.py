"""A fused run keeps nothing of the steps behind it."""

from __future__ import annotations

import gc
from typing import Any

import torch
from transformers import TrainerCallback

import holdfast as hf
from holdfast.training.fused_engine import FusedEngine
from tests.contracts.defense_cases import Case, build, dataset


def tensors() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))


class Count(TrainerCallback):
    """The tensors that exist after some of the steps."""

    def __init__(self, *at: int) -> None:
        self.at, self.found = at, []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in self.at:
            self.found.append(tensors())


LIMIT = {"tau": 0.05, "alpha": 0.2, "beta": 20.0}
TWO = {
    "safety_dataset": {"one": dataset(16, 2, "w0"), "two": dataset(16, 4, "w3")},
    "constraint": {
        "one": hf.ChanceConstraint(**LIMIT, unit="nll_token"),
        "two": hf.ChanceConstraint(**LIMIT, unit="kl_token"),
    },
}


def counted(folder, first: int, last: int, given: dict[str, Any] | None = None, **options: Any) -> list[int]:
    """Tensors after two of the steps of a fused run with dropout."""
    trainer = build(
        folder, Case("holdfast", "finetune", "fused"), given=given, max_steps=last, per_device_train_batch_size=1,
        safety_batch_size=2, logging_strategy="no", **options,
    )  # fmt: skip
    count = Count(first, last)
    trainer.add_callback(count)
    trainer.train()
    assert trainer.run.engine.fused
    assert count.found[0] > 50
    return count.found


def test_the_number_of_tensors_is_flat_over_a_hundred_steps(tmp_path):
    early, late = counted(tmp_path, 50, 150, {"constraint": hf.ChanceConstraint(**LIMIT, unit="nll_token")})
    assert late == early


def test_also_with_two_constraints_skipped_rows_and_micro_batches(tmp_path):
    options = {"skip_inactive_rows": "on", "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    early, late = counted(tmp_path, 10, 30, TWO, **options)
    assert late == early


def test_the_count_can_fail(tmp_path, monkeypatch):
    kept, inner = [], FusedEngine._add
    monkeypatch.setattr(FusedEngine, "_add", lambda self, found: (kept.append(found), inner(self, found))[1])
    early, late = counted(tmp_path, 2, 4)
    assert late > early
