"""Primal-dual: the update on a convex toy, and the whole defense as a literal transcription on the tiny model."""

from __future__ import annotations

import pytest
import torch

import holdfast as hf
from holdfast.core.event_log import read
from holdfast.training.side_pass import may_share_backward
from holdfast_lab.defenses.primal_dual import PrimalDual, dual_step
from tests import tiny
from tests.oracle.plain_lm import SGD, PlainLM, theta, whole_batch_trainer
from tests.unit.trainers.building import SLACK, same, weights
from tests.unit.trainers.building import deep as build

LR, STEPS = 0.1, SGD["max_steps"]
TAU, BETA, ALPHA, BUFFER = 0.5, 0.5, 0.6, 0.05
RAMP = hf.ChanceConstraint(
    tau=TAU, beta=BETA, alpha=ALPHA, buffer=BUFFER, allow_infeasible_start=True, unit="nll_token"
)
START, RATE = 2.0, 2.0


def test_convex_toy_converges_to_its_saddle_point():
    """min (x - 2)^2 subject to x <= 1: 2 (x - 2) + mu = 0 at x = 1 gives mu = 2."""
    x, mu = torch.tensor(0.0, dtype=torch.float64, requires_grad=True), 0.0
    for _ in range(2000):
        c = x  # <= 1
        (gradient,) = torch.autograd.grad((x - 2) ** 2 + mu * c, x)
        mu = dual_step(mu, float(c.detach()) - 1.0, rate=0.05, cap=100.0)
        with torch.no_grad():
            x -= 0.05 * gradient
    assert float(x.detach()) == pytest.approx(1.0, abs=1e-6)
    assert mu == pytest.approx(2.0, abs=1e-6)


@pytest.mark.parametrize(
    ("mu", "excess", "expected"),
    [(1.0, -0.5, 0.75), (0.1, -0.5, 0.0), (1.0, 0.5, 1.25), (9.9, 0.5, 10.0), (0.0, -1.0, 0.0)],
    ids=["falls", "not below zero", "rises", "not above the cap", "stays at zero"],
)
def test_the_dual_update_by_hand(mu, excess, expected):
    assert dual_step(mu, excess, rate=0.5, cap=10.0) == pytest.approx(expected, abs=1e-15)


def by_hand(lm: PlainLM) -> list[tuple[float, float]]:
    """Loss, step, then the multiplier, with the c of that loss."""
    mu, seen = START, []
    for _ in range(STEPS):  # type: ignore[call-overload]

        def c() -> torch.Tensor:
            d = lm.degradations()
            return sum(torch.clamp(1 + BETA * (x - TAU), min=0) for x in d) / len(d)  # type: ignore[return-value]

        value, _ = lm.gradient(c)
        multiplier = mu
        _, gradient = lm.gradient(lambda multiplier=multiplier, c=c: lm.task_loss() + multiplier * c())  # type: ignore[misc]
        lm.move(-LR * gradient)
        seen.append((value, mu))
        mu = min(max(mu + RATE * (value - ALPHA + BUFFER), 0.0), 100.0)
    return [*seen, (float("nan"), mu)]


@pytest.mark.parametrize(
    ("accumulation", "single", "step"),
    [(2, True, "two_pass"), (1, False, "two_pass"), (1, True, "fused"), (2, False, "fused")],
    ids=["one backward, accumulated", "two backwards", "fused", "fused, accumulated"],
)
def test_primal_dual_is_its_transcription(tmp_path, accumulation, single, step):
    defense = {"name": "primal_dual", "start": START, "dual_rate": RATE, "single_backward": single}
    trainer = whole_batch_trainer(tmp_path, defense, RAMP, accumulation=accumulation, learning_rate=LR, step=step)
    lm = PlainLM(trainer)
    start = lm.theta()
    trainer.train()
    assert trainer.run.engine.fused == (step == "fused")
    *seen, (_, last) = by_hand(lm)
    torch.testing.assert_close(theta(trainer), lm.theta(), rtol=1e-5, atol=2e-6)
    assert float((lm.theta() - start).abs().max()) > 0.02
    rows = read(trainer.run_dir / "events.jsonl")
    assert [row["multiplier"] for row in rows] == pytest.approx([mu for _, mu in seen], rel=1e-4)
    assert [row["g"] for row in rows] == pytest.approx([c - ALPHA for c, _ in seen], abs=1e-5)
    assert [row["value"] for row in rows] == pytest.approx([c - ALPHA + BUFFER for c, _ in seen], abs=1e-5)
    assert trainer.defense.state_dict()["duals"]["safety"]["mu"] == pytest.approx(last, rel=1e-4)
    assert last > START + 0.5  # it does move
    assert max(c for c, _ in seen) - min(c for c, _ in seen) > 0.01


def test_the_multiplier_rises_while_violated_and_falls_to_zero_once_met(tmp_path):
    """b: never negative. The unchanged model has c = 0.05: above alpha = 0.02, below alpha = 0.5."""
    for alpha, expected in ((0.02, [0.1, 0.13]), (0.5, [0.1, 0.0])):
        constraint = hf.ChanceConstraint(tau=0.5, beta=1.9, alpha=alpha, allow_infeasible_start=True, unit="nll_token")
        defense = {"name": "primal_dual", "start": 0.1, "dual_rate": 1.0}
        trainer = whole_batch_trainer(tmp_path / str(alpha), defense, constraint, learning_rate=0.0, max_steps=2)
        trainer.train()
        found = [row["multiplier"] for row in read(trainer.run_dir / "events.jsonl")]
        assert found == pytest.approx(expected, abs=1e-6)


def test_the_multiplier_waits_for_the_warm_up(tmp_path):
    """c: twelve rows in batches of four are three steps a pass; the first four steps begin in the first 1.3 passes."""
    defense = {"name": "primal_dual", "start": 3.0, "dual_rate": 1.0, "warmup_epochs": 1.3}
    constraint = hf.ChanceConstraint(tau=0.5, beta=1.9, alpha=0.02, allow_infeasible_start=True, unit="nll_token")
    trainer = build(
        tmp_path, given={"defense": defense, "constraint": constraint}, max_steps=7, per_device_train_batch_size=4,
        learning_rate=0.0,
    )  # fmt: skip
    trainer.train()
    found = [row["multiplier"] for row in read(trainer.run_dir / "events.jsonl")]
    # Steps 0 to 3 begin after 0, 1/3, 2/3 and 1 passes; step 4, after 4/3, is the first to move it.
    assert found == pytest.approx([3.0] * 5 + [3.03, 3.06], abs=1e-5)


def test_the_multiplier_is_saved_and_restored(tmp_path):
    """d: two steps, a new process, two steps are four steps; bit for bit, cvar's moving threshold included."""
    constraint = hf.ChanceConstraint(tau=0.02, alpha=0.1, majorizer="cvar", unit="nll_token")
    given = {
        "defense": {"name": "primal_dual", "dual_rate": 5.0}, "constraint": constraint, "peft_config": tiny.lora(0.2),
    }  # fmt: skip
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 2e-2}
    whole = build(tmp_path / "a", given=given, **options)
    whole.train()
    again = build(tmp_path / "a", given=given, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "run" / "checkpoint-2"))
    assert same(weights(whole), weights(again))
    ours, theirs = (t.defense.state_dict()["duals"]["safety"] for t in (whole, again))
    assert (ours["mu"], ours["cvar_t"]) == (theirs["mu"], theirs["cvar_t"])
    assert ours["mu"] != 1.0
    assert ours["cvar_t"] > 0.0


def test_evaluation_does_not_move_the_multiplier(tmp_path):
    """e: neither evaluations between the steps nor one at the end."""
    given = {
        "defense": {"name": "primal_dual", "dual_rate": 5.0},
        "constraint": hf.ChanceConstraint(tau=0.02, beta=50.0, unit="nll_token"),
        "eval_dataset": tiny.dataset(6, seed=8, start="w1"),
    }  # fmt: skip
    quiet = build(tmp_path / "a", given=given)
    quiet.train()
    watched = build(tmp_path / "b", given=given, eval_strategy="steps", eval_steps=1)
    watched.train()
    mu = watched.defense.state_dict()
    watched.evaluate()
    assert watched.defense.state_dict() == mu == quiet.defense.state_dict()
    assert same(weights(quiet), weights(watched))


def test_without_multiplier_it_is_sft(tmp_path):
    """Bit for bit, with AdamW, dropout, weight decay and accumulation."""
    off = {"name": "primal_dual", **PrimalDual.off}
    found = []
    for defense in ("sft", off, {**off, "single_backward": False}):
        given = {"defense": defense, "constraint": SLACK, "peft_config": tiny.lora(0.2)}
        trainer = build(tmp_path / str(len(found)), given=given, weight_decay=0.1, gradient_accumulation_steps=2)
        trainer.train()
        found.append(weights(trainer))
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_the_term_has_weight_one_where_the_trainer_divides_by_the_micro_batches(tmp_path):
    """A model that cannot be told the step's tokens: the loss of every micro-batch is then divided by their number."""
    found = {}
    for name, defense in (("sft", "sft"), ("pd", {"name": "primal_dual", "start": START, "dual_rate": 0.0})):
        trainer = whole_batch_trainer(
            tmp_path / name, defense, RAMP, accumulation=2, max_steps=1, learning_rate=LR
        )  # fmt: skip
        trainer.model_accepts_loss_kwargs = False
        lm = PlainLM(trainer)
        trainer.train()
        found[name] = theta(trainer)
    _, expected = lm.gradient(lambda: sum(torch.clamp(1 + BETA * (x - TAU), min=0) for x in lm.degradations()) / 6)  # type: ignore[return-value]
    torch.testing.assert_close(found["pd"] - found["sft"], -LR * START * expected, rtol=1e-4, atol=1e-6)
    assert float(expected.abs().max()) > 0.01


def test_checkpointing_with_dropout_takes_a_second_backward_of_the_same_gradient(tmp_path):
    """Run again in the backward, the safety rows would meet dropout: the two layouts would then part."""
    found, joint = [], []
    for checkpointing in (False, True):
        given = {
            "defense": {"name": "primal_dual", "start": 5.0}, "constraint": RAMP, "peft_config": tiny.lora(0.3),
        }  # fmt: skip
        options = {**SGD, "max_steps": 2, "learning_rate": LR, "gradient_checkpointing": checkpointing}
        trainer = build(tmp_path / str(checkpointing), given=given, **options)
        trainer.train()
        found.append(theta(trainer))
        joint.append(may_share_backward(trainer.model, trainer.args))
    assert joint == [True, False]
    torch.testing.assert_close(*found, rtol=1e-5, atol=2e-6)


def test_the_logged_loss_is_the_task_s(tmp_path):
    found = []
    for defense in ("sft", {"name": "primal_dual", "start": 50.0}):
        trainer = whole_batch_trainer(tmp_path / str(len(found)), defense, RAMP, accumulation=2, max_steps=1)
        trainer.train()
        found.append(read(trainer.run_dir / "events.jsonl")[0]["loss"])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
