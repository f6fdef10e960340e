"""A side term that is not a number never reaches the weights: it is left out by name, and too many end the run."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tests import tiny
from tests.unit.trainers.building import SLACK, build, same, weights

from holdfast.core.errors import NumericalError
from holdfast.core.event_log import read
from holdfast.training import side_pass
from holdfast.training import step as step_module
from holdfast_lab.building_blocks.side_term import NonfiniteWatch

TWO_PASSES = {"name": "primal_dual", "single_backward": False}
DEFENSES = {"mix": "mix", "kl": "kl", "safegrad": "safegrad", "penalty": "penalty", "primal_dual": TWO_PASSES}
EACH = pytest.mark.parametrize("defense", DEFENSES.values(), ids=list(DEFENSES))


@pytest.fixture
def spoil(monkeypatch):
    """Put a NaN into the gradients of some side passes, counted from 0."""

    def apply(steps: range) -> None:
        seen = iter(range(10**6))
        for module in (step_module, side_pass):
            real = module.side_gradient

            def spoiled(*args, real=real):
                values, gradient = real(*args)
                if next(seen) in steps:
                    gradient[0].view(-1)[0] = math.nan
                return values, gradient

            monkeypatch.setattr(module, "side_gradient", spoiled)

    return apply


def trained(folder, defense, **options):
    trainer = build(folder, given={"defense": defense, "constraint": SLACK}, **{"max_steps": 2, **options})
    trainer.train()
    return trainer


@EACH
def test_the_step_is_the_task_s_alone_and_its_row_says_so(tmp_path, spoil, defense):
    plain = trained(tmp_path / "sft", "sft")
    spoil(range(2))
    trainer = trained(tmp_path / "own", defense)
    assert same(weights(plain), weights(trainer))
    assert [row["event"] for row in read(trainer.run_dir / "events.jsonl")] == ["nonfinite"] * 2
    json.dumps(trainer.defense.row(), allow_nan=False)
    assert trainer.defense.state_dict()["left_out"] == [0, 1]


@EACH
def test_the_next_step_has_its_term_again(tmp_path, spoil, defense):
    spoil(range(1))
    trainer = trained(tmp_path, defense)
    events = [row.get("event") for row in read(trainer.run_dir / "events.jsonl")]
    assert events[0] == "nonfinite"
    assert events[1] in (None, "active")


@EACH
def test_four_in_a_hundred_steps_end_the_run(tmp_path, spoil, defense):
    spoil(range(100))
    with pytest.raises(NumericalError) as caught:
        trained(tmp_path, defense, max_steps=6)
    assert "not finite in 4 of the last 100 steps" in caught.value.what
    assert caught.value.remedy


@EACH
def test_the_count_is_resumed(tmp_path, spoil, defense):
    spoil(range(100))
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    with pytest.raises(NumericalError):
        trained(tmp_path, defense, **options)
    again = build(tmp_path, given={"defense": defense, "constraint": SLACK}, **options)
    with pytest.raises(NumericalError):
        again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert again.state.global_step == 3


def test_old_steps_are_forgotten():
    watch = NonfiniteWatch("mix")
    for step in range(0, 1000, 40):
        assert not watch.accepts(step, 1.0, math.inf)
    assert watch.accepts(1001, 1.0, 2.0)
    assert watch.steps == [880, 920, 960]


@pytest.mark.parametrize(
    "defense", [{"name": "mix", "weight": 0.0}, {"name": "safegrad", "rho": 0.0, "project": False}]
)
def test_a_term_of_weight_zero_is_looked_at_only(tmp_path, spoil, defense):
    plain = trained(tmp_path / "sft", "sft", max_steps=5)
    spoil(range(100))
    assert same(weights(plain), weights(trained(tmp_path / "off", defense, max_steps=5)))


def test_a_joint_gradient_that_is_not_finite_voids_the_step(tmp_path, monkeypatch):
    """c is a number, its gradient is none: the task's part cannot be told apart, so nothing moves."""
    trainer = build(
        tmp_path,
        given={"defense": {"name": "primal_dual", "dual_rate": 5.0}, "constraint": SLACK, "peft_config": tiny.lora()},
        max_steps=2,
    )
    real = trainer.run.engine.degradations

    def spoiled(name):
        d = real(name)
        d.register_hook(lambda g: g * math.nan)
        return d

    monkeypatch.setattr(trainer.run.engine, "degradations", spoiled)
    monkeypatch.setattr(type(SLACK), "phi", lambda self, d: (1 + self.beta * d).clamp(min=0))
    start = weights(trainer)
    trainer.train()
    rows = read(trainer.run_dir / "events.jsonl")
    assert [row["event"] for row in rows] == ["nonfinite"] * 2
    assert same(start, weights(trainer))
    assert trainer.defense.state_dict()["duals"]["safety"]["mu"] == 1.0
    assert not any(torch.isnan(p).any() for p in trainer.model.parameters())
