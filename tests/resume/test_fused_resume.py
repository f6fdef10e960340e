"""Fused runs that died and were resumed: bit for bit the run that did not die; on another path the same to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import tiny
from tests.resume.test_resume_exact import CHECKPOINTED, KL, TWO, assert_same, die_at, resumed, uninterrupted
from tests.resume.worker import build, weights

import holdfast as hf
from holdfast.defenses.holdfast import FilteredDefense
from holdfast.training.fingerprint import HARMLESS, argument_fingerprint
from holdfast.training.fused_engine import FusedEngine

FUSED = {"step": "fused"}
CONTINUED = {"start": lambda: tiny.continued(dropout=0.1), "peft_config": None}
# Nearly all rows are flat throughout, so that after about ten steps `skip_inactive_rows: auto` looks before it steps.
MOSTLY_FLAT = hf.ChanceConstraint(tau=0.5, beta=5.0, unit="nll_token")


def dropout(rate: float = 0.1) -> dict[str, Any]:
    return {"peft_config": tiny.lora(rate)}


@pytest.fixture
def skips(monkeypatch) -> list[bool]:
    """Whether inactive rows were skipped in each micro-batch."""
    seen: list[bool] = []
    inner = FusedEngine.accumulate

    def noted(self, inputs, items, weights, *, skip=False):
        seen.append(skip)
        return inner(self, inputs, items, weights, skip=skip)

    monkeypatch.setattr(FusedEngine, "accumulate", noted)
    return seen


@pytest.mark.parametrize(
    "changes",
    [{"args": CHECKPOINTED}, {"args": {"skip_inactive_rows": "on"}, **TWO}, {"constraint": KL, **CONTINUED}],
    ids=["checkpointed", "skipping, two constraints", "continued adapter, kl_token"],
)
def test_a_resumed_run_is_bit_identical(tmp_path, changes, skips):
    args = {**FUSED, **changes.get("args", {})}
    changes = {**dropout(), **changes, "args": args}
    expected = uninterrupted(tmp_path / "whole", **changes)
    assert skips  # or two passes would be compared
    assert any(row["active"] for row in expected[1])
    die_at(tmp_path / "cut", 5, **changes)
    assert_same(resumed(tmp_path / "cut", **changes), expected)


def test_the_share_of_flat_rows_is_restored(tmp_path, skips):
    args, rows = {**FUSED, **CHECKPOINTED, "max_steps": 16}, tiny.rows(40, seed=2)
    changes = {"args": args, "constraint": MOSTLY_FLAT, "safety_dataset": rows, **dropout()}
    expected = uninterrupted(tmp_path / "whole", **changes)
    whole = skips.copy()
    assert set(whole) == {True, False}, "it is decided otherwise on the way"
    die_at(tmp_path / "cut", 13, **changes)
    skips.clear()
    assert_same(resumed(tmp_path / "cut", **changes), expected)
    assert skips == whole[-len(skips) :]
    assert skips[0]


def test_a_checkpoint_of_an_earlier_version_does_not_know_that_share(tmp_path, monkeypatch):
    changes = {"args": FUSED, **dropout()}
    expected = uninterrupted(tmp_path / "whole", **changes)
    inner = FilteredDefense.state_dict
    earlier = lambda self: {k: v for k, v in inner(self).items() if k != "inactive"}  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(FilteredDefense, "state_dict", earlier)
        die_at(tmp_path / "cut", 5, **changes)
    assert_same(resumed(tmp_path / "cut", **changes), expected)


@pytest.mark.parametrize(("first", "then"), [("two_pass", "fused"), ("fused", "two_pass")])
def test_another_path_goes_on_with_the_same_run(tmp_path, first, then):
    """What one changes after running out of memory, or on another machine; without dropout, whose masks are others."""
    settings = {**dropout(0.0), "args": {"optim": "sgd", "learning_rate": 0.1}}

    def on(step: str) -> dict[str, Any]:
        return {**settings, "args": {**settings["args"], "step": step}}

    expected, rows = uninterrupted(tmp_path / "whole", **on(first))
    die_at(tmp_path / "cut", 5, **on(first))
    found, found_rows = resumed(tmp_path / "cut", **on(then))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    assert [row["event"] for row in found_rows] == [row["event"] for row in rows]
    assert any(row["active"] for row in rows[5:])


def test_the_paths_bind_no_checkpoint(tmp_path):
    assert {"step", "step_graphs", "skip_inactive_rows"} <= HARMLESS
    one, other = (build(tmp_path / s, args={"step": s}) for s in ("two_pass", "fused"))
    assert argument_fingerprint(one.args) == argument_fingerprint(other.args)
    assert weights(one).keys() == weights(other).keys()
