"""A fused step that does not fit in memory: the run goes on in two passes, and loses nothing of the step."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.core.errors import ResourceError
from holdfast.training import fused_engine
from tests.oracle.test_fused_step import ALL_ACTIVE, Watch, close
from tests.unit.trainers.building import deep as build
from tests.unit.trainers.building import weights

OPTIONS = {"learning_rate": 0.05, "optim": "sgd", "max_steps": 4, "safety_batch_size": 4}


def made(folder: Any, **options: Any) -> tuple[hf.SafeSFTTrainer, Watch, list[dict[str, Any]]]:
    given = {"constraint": hf.ChanceConstraint(**ALL_ACTIVE, unit="nll_token")}
    if "defense" in options:
        given["defense"] = options.pop("defense")
    trainer = build(folder, given=given, **{**OPTIONS, **options})
    rows: list[dict[str, Any]] = []
    trainer.step_listeners.append(rows.append)
    return trainer, Watch(trainer), rows


FULL = torch.OutOfMemoryError("CUDA out of memory")


def failing(
    trainer: hf.SafeSFTTrainer, monkeypatch: pytest.MonkeyPatch, at: int, step: str = "auto", error: Exception = FULL
) -> list[int]:
    """Make the engine as on a GPU, and let its pass number `at` fail, out of memory; returns the passes made."""
    assert trainer.run.engine.fused
    monkeypatch.setattr(trainer.args, "step", step)
    inner, passes = trainer.run.engine.joint.run, []  # type: ignore[attr-defined]

    def run(*args: Any, **kwargs: Any) -> Any:
        passes.append(len(passes))
        if len(passes) > at:
            raise error
        return inner(*args, **kwargs)

    trainer.run.engine.joint.run = run  # type: ignore[attr-defined]
    return passes


@pytest.fixture(scope="module")
def two_passes(tmp_path_factory):
    """Options -> weights, gradients and rows of the run that takes two passes from the start, trained once."""
    known: dict[str, tuple[dict[str, torch.Tensor], Watch, list[dict[str, Any]]]] = {}

    def run(**options: Any) -> tuple[dict[str, torch.Tensor], Watch, list[dict[str, Any]]]:
        key = repr(options)
        if key not in known:
            trainer, watch, rows = made(tmp_path_factory.mktemp("two"), step="two_pass", **options)
            trainer.train()
            known[key] = weights(trainer), watch, rows
        return known[key]

    return run


@pytest.mark.parametrize("defense", ["holdfast", "primal_dual", "mean_constraint"])
@pytest.mark.parametrize(("micros", "at"), [(1, 0), (1, 2), (3, 4)], ids=["first", "later", "within a step"])
def test_the_run_goes_on_in_two_passes(tmp_path, monkeypatch, caplog, two_passes, defense, micros, at):
    options = {"defense": defense, "gradient_accumulation_steps": micros}
    trainer, watch, rows = made(tmp_path / "auto", step="fused", **options)
    passes = failing(trainer, monkeypatch, at)
    with caplog.at_level(logging.WARNING, "holdfast"):
        trainer.train()
    two, expected, expected_rows = two_passes(**options)
    assert len(passes) == at + 1
    assert trainer.run.engine_name == "two_pass"
    assert trainer.run.step_declined == f"out of memory in one pass, at step {at // micros + 1}"
    assert f"from step {at // micros + 1} on: one pass runs out of memory" in caplog.text
    assert len(watch.task) == OPTIONS["max_steps"]
    if defense != "primal_dual":  # whose gradient holds its term already where both are one backward
        close(watch.task, expected.task, 1e-5)
    found = weights(trainer)
    for name, value in two.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    for ours, theirs in zip(rows, expected_rows, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["event"] == theirs["event"]


def test_memory_of_the_host_counts_too_and_another_error_does_not(tmp_path, monkeypatch):
    trainer, *_ = made(tmp_path / "host", step="fused")
    failing(trainer, monkeypatch, 1, error=RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    trainer.train()
    assert trainer.run.engine_name == "two_pass"
    trainer, *_ = made(tmp_path / "other", step="fused")
    failing(trainer, monkeypatch, 1, error=RuntimeError("another error"))
    with pytest.raises(RuntimeError, match="another error"):
        trainer.train()


def test_who_asked_for_a_fused_step_is_told(tmp_path, monkeypatch):
    trainer, *_ = made(tmp_path, step="fused")
    failing(trainer, monkeypatch, 1, step="fused")
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()


def test_one_process_of_several_does_not_leave_the_others(tmp_path, monkeypatch):
    """The others would wait for gradients that never come."""
    trainer, *_ = made(tmp_path, step="fused")
    failing(trainer, monkeypatch, 0)
    monkeypatch.setattr(fused_engine, "world", lambda: 2)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()


def test_two_passes_that_do_not_fit_either_end_the_run(tmp_path, monkeypatch):
    trainer, *_ = made(tmp_path, step="fused")
    failing(trainer, monkeypatch, 0)

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer, "compute_loss", full)
    with pytest.raises(ResourceError, match="out of memory in step 1 with a single row a pass"):
        trainer.train()
