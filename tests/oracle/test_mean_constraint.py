"""Equation (4) and the penalty beside it, transcribed literally on the tiny language model under SGD."""

from __future__ import annotations

import math

import pytest
import torch

import holdfast as hf
from holdfast.core.event_log import read
from tests import tiny
from tests.oracle.plain_lm import SGD, PlainLM, theta, whole_batch_trainer
from tests.unit.trainers.building import deep as build
from tests.unit.trainers.building import same, weights

LR, STEPS = SGD["learning_rate"], SGD["max_steps"]
CONSTRAINT = hf.ChanceConstraint(tau=0.5, alpha=0.1, beta=4.0, unit="nll_token")
EPSILON = 0.002


def filtered_by_hand(lm: PlainLM, epsilon: float, rate: float) -> list[tuple[float, float]]:
    """The step of SGD, moved the shortest way into `h . s <= -rate (mean D - epsilon)`."""
    seen = []
    for _ in range(STEPS):  # type: ignore[call-overload]
        _, task = lm.gradient(lm.task_loss)
        mean, h = lm.gradient(lambda: torch.stack(lm.degradations()).mean())
        nominal = -LR * task
        excess = float(h.double() @ nominal.double()) + rate * (mean - epsilon)
        mu = max(0.0, excess) / float(h.double() @ h.double())
        lm.move(nominal - mu * h)
        seen.append((mean, mu))
    return seen


@pytest.mark.parametrize(("space", "accumulation"), [("update", 2), ("gradient", 1)], ids=["update", "gradient"])
def test_mean_constraint_is_its_transcription(tmp_path, space, accumulation):
    options = {"epsilon": EPSILON, "space": space, "rate": 0.5, "estimator": "batch", "trust_region": 1e9}
    defense = {"name": "mean_constraint", **options, **({"metric": "identity"} if space == "update" else {})}
    trainer = whole_batch_trainer(tmp_path, defense, CONSTRAINT, accumulation=accumulation)
    lm = PlainLM(trainer)
    start = lm.theta()
    trainer.train()
    seen = filtered_by_hand(lm, EPSILON, rate=0.5)
    assert sum(mu > 1e-3 for _, mu in seen) >= 2, seen  # the filter has something to do
    torch.testing.assert_close(theta(trainer), lm.theta(), rtol=1e-5, atol=2e-6)
    assert float((lm.theta() - start).abs().max()) > 0.02
    rows = read(trainer.run_dir / "events.jsonl")
    assert [row["mean_degradation"] for row in rows] == pytest.approx([mean for mean, _ in seen], abs=2e-6)
    assert [row["g"] for row in rows] == pytest.approx([mean - EPSILON for mean, _ in seen], abs=2e-6)
    scale = LR if space == "gradient" else 1.0  # there the multiplier belongs to the gradient, not to the step
    assert [scale * row["multiplier"] for row in rows] == pytest.approx([mu for _, mu in seen], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("term", ["mean", "majorizer"])
def test_penalty_is_its_transcription(tmp_path, term):
    weight, ramp = 2.0, hf.ChanceConstraint(tau=0.5, alpha=0.05, beta=1.9, unit="nll_token")
    trainer = whole_batch_trainer(tmp_path, {"name": "penalty", "weight": weight, "term": term}, ramp, accumulation=2)
    lm = PlainLM(trainer)
    trainer.train()
    values = []

    def penalty() -> torch.Tensor:
        d = lm.degradations()
        return sum(x if term == "mean" else torch.clamp(1 + 1.9 * (x - 0.5), min=0) for x in d) / len(d)  # type: ignore[return-value]

    for _ in range(STEPS):  # type: ignore[call-overload]
        _, task = lm.gradient(lm.task_loss)
        value, added = lm.gradient(penalty)
        values.append(value)
        lm.move(-LR * (task + weight * added))
    torch.testing.assert_close(theta(trainer), lm.theta(), rtol=1e-5, atol=2e-6)
    rows = read(trainer.run_dir / "events.jsonl")
    assert [row["penalty"] for row in rows] == pytest.approx(values, rel=1e-4, abs=2e-5)
    assert max(values) - min(values) > 0.01


def test_a_slack_mean_constraint_is_sft(tmp_path):
    """Bit for bit, with AdamW, dropout and weight decay."""
    options = {"max_steps": 3, "weight_decay": 0.1, "gradient_accumulation_steps": 2}
    found = []
    for name in ("sft", "mean_constraint", {"name": "mean_constraint", "estimator": "table"}):
        given = {
            "constraint": hf.ChanceConstraint(tau=1e6, beta=10.0, unit="nll_token"),
            "peft_config": tiny.lora(0.2),
            "defense": name,
        }
        trainer = build(tmp_path / str(len(found)), given=given, **options)
        trainer.train()
        found.append(weights(trainer))
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_epsilon_is_tau_unless_given(tmp_path):
    found = []
    for number, epsilon in enumerate((None, 0.02, 0.5)):
        defense = {"name": "mean_constraint", "epsilon": epsilon}
        trainer = build(
            tmp_path / str(number),
            given={"defense": defense, "constraint": hf.ChanceConstraint(tau=0.02, beta=50.0, unit="nll_token")},
            max_steps=2,
        )
        trainer.train()
        found.append(weights(trainer))
        assert math.isfinite(read(trainer.run_dir / "events.jsonl")[-1]["g"])
    assert same(found[0], found[1])
    assert not same(found[0], found[2])
