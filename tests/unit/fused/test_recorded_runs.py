"""Whole runs over recorded passes take the steps of runs over unrecorded ones."""

from __future__ import annotations

import pytest
import torch
from tests import hybrid, tiny
from tests.unit.fused.comparing import adapted
from tests.unit.trainers.building import deep as build
from tests.unit.trainers.building import weights

import holdfast as hf
from holdfast.training import fused_setup

SOME = {"tau": 0.02, "alpha": 0.05, "beta": 60.0}  # flat below 0.0033: not where degradations begin, by rounding
FAST = {"learning_rate": 0.2, "optim": "sgd", "max_steps": 4, "safety_batch_size": 4}


def several():
    return {
        "safety_dataset": {"one": tiny.dataset(20, seed=2), "two": tiny.dataset(20, seed=5)},
        "constraint": {
            "one": hf.ChanceConstraint(**SOME, unit="nll_token"),
            "two": hf.ChanceConstraint(**SOME, unit="kl_token"),
        },
    }


def mixed():
    limit = hf.ChanceConstraint(**SOME, unit="nll_token")
    return {"model": hybrid.model(), "peft_config": hybrid.lora(), "constraint": limit}


def align():
    return {"defense": "antibody", "harmful_dataset": tiny.dataset(12, seed=7, start="w2"), "safety_dataset": None}


def continued():
    """A model whose adapter has been trained before."""
    return adapted(tiny.model(), ("q_proj", "k_proj", "v_proj"))


CASES = {
    "several sets, rows skipped": (
        several,
        {"gradient_accumulation_steps": 3, "skip_inactive_rows": "on", "safety_batch_size": 2},
    ),
    "hybrid": (mixed, {}),
    "primal_dual": (lambda: {"defense": "primal_dual", **several()}, {"gradient_accumulation_steps": 2}),
    "antibody": (align, {"stage": "align"}),
    "safegrad": (lambda: {"defense": "safegrad", "model": continued(), "peft_config": None}, {}),
}
"""Two sets with kl_token, with a pass that looks first; padded mixers; three side passes a step, theta moved between
them; the first weights put back for a side pass."""


@pytest.mark.parametrize("case", CASES)
def test_recorded_steps_are_the_unrecorded_ones(cuda, tmp_path, monkeypatch, case):
    make, options = CASES[case]
    found = []
    for records in (True, False):
        monkeypatch.setattr(fused_setup, "_records", lambda *_, records=records: records)
        trainer = build(tmp_path / str(records), given=make(), step="fused", **{**FAST, **options})
        trainer.train()
        assert trainer.run.engine_name == ("fused, recorded" if records else "fused")
        found.append(weights(trainer))
        if records:
            assert 1 <= len(trainer.run.engine.joint.passes._recordings) <= 8  # type: ignore[attr-defined]
            assert len(cuda.tapes) < sum(tape.replays for tape in cuda.tapes)
    moved = 0.0
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-4, atol=1e-6)
        moved = max(moved, float(value.abs().max()))
    assert moved > 0
