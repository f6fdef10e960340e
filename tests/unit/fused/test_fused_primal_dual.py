"""primal_dual's fused step: what is not finite in one row reaches the sums of all, and must not reach the weights."""

from __future__ import annotations

import json

import pytest
import torch
from tests import tiny
from tests.unit.fused.test_fused_run import Spoil
from tests.unit.trainers.building import deep as build
from tests.unit.trainers.building import weights

import holdfast as hf

LIMIT = {"tau": 0.05, "alpha": 0.05, "beta": 5.0, "allow_infeasible_start": True, "unit": "nll_token"}


@pytest.mark.parametrize(("where", "start"), [("task", 1.0), ("one", 1.0), ("two", 0.0)])
def test_a_row_that_is_not_finite_voids_the_step_and_moves_no_multiplier(tmp_path, where, start):
    first = {name: "unknown" if name == where else "w0" for name in ("one", "two")}
    given = {
        "defense": {"name": "primal_dual", "start": start, "dual_rate": 1.0},
        "train_dataset": tiny.dataset(12, seed=1, start="unknown" if where == "task" else "w1"),
        "safety_dataset": {
            name: tiny.dataset(20, seed=2 + (name == "two"), start=word) for name, word in first.items()
        },
        "constraint": hf.ChanceConstraint(**LIMIT),
        "callbacks": [Spoil(1)],
    }  # fmt: skip
    trainer = build(tmp_path, given=given, step="fused", max_steps=3, gradient_accumulation_steps=2)
    trainer.train()
    assert trainer.run.engine.fused
    assert all(bool(torch.isfinite(w).all()) for w in weights(trainer).values())
    rows = [json.loads(line) for line in (trainer.run_dir / "events.jsonl").read_text().splitlines()]
    assert [row["event"] == "nonfinite" for row in rows] == [False, True, False]
    for name in first:
        before, at, after = (row["constraints"][name]["multiplier"] for row in rows)
        assert before == start
        assert at == after != before
