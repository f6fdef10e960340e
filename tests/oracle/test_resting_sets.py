"""Sets that are far from their limit are measured at some steps only; their averages stand for them in between."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.constraint.anchor import Limit
from holdfast.core import event_log
from holdfast.core.errors import ConfigError
from holdfast.training.step import TwoPassEngine
from tests import tiny
from tests.unit.trainers.building import build, same, weights

F64 = torch.float64
SETS = {"far": tiny.dataset(16, seed=2), "near": tiny.dataset(16, seed=3, start="w2")}
# A KL of this model moves by about 1e-3 in these steps.
LIMITS = {
    "far": hf.ChanceConstraint(tau=10.0, alpha=0.5, beta=0.1, unit="kl_token"),
    "near": hf.ChanceConstraint(tau=1e-3, alpha=0.05, beta=1e3, unit="kl_token"),
}
RESTING = {"name": "holdfast", "verify": 4, "rest": 3, "dual": 0.1, "reserve": 0.2}


def filtered(**options: object) -> tuple[hf.SafetyFilter, torch.nn.Parameter]:
    p = torch.nn.Parameter(torch.zeros(2, dtype=F64))
    sgd = torch.optim.SGD([p], lr=0.1)
    return hf.SafetyFilter(sgd, gradient_decay=0.5, rate=1.0, verified=True, **options), p


def step(
    filt: hf.SafetyFilter, p: torch.nn.Parameter, task: list[float], values: Any, gradients: Any, estimates: Any
) -> torch.Tensor:
    before = p.detach().clone()
    p.grad = torch.tensor(task, dtype=F64)
    filt.arm(values, gradients, estimates, [Limit(-1.0, 1.0)] * 2)
    filt.optimizer.step()
    return p.detach() - before


def test_the_average_of_a_set_that_rests_stands_for_it_and_follows_the_distance():
    """By hand: after a step of (0.1, 0.2), measured at theta_0, h_2 is scaled from its mean distance to today's."""
    filt, p = filtered()
    one, two = torch.tensor([1.0, 0.0], dtype=F64), torch.tensor([0.0, 3.0], dtype=F64)
    step(filt, p, [-1.0, -2.0], [-9.0, -9.0], [[one], [two]], None)
    step(filt, p, [0.0, 0.0], [-9.0, -9.0], [[one], [two]], None)
    r = float(p.detach().norm())
    average = two / 2 + two / 4  # decay 0.5, not debiased
    expected = average * r / filt.anchor.mean_distances[1]
    assert filt.anchor.mean_distances == [0.5 * r, 0.5 * r]
    moved = step(filt, p, [0.0, -5.0], [-9.0, None], [[2 * one], None], [-9.0, 0.0])
    assert float(expected @ moved) == pytest.approx(0.0, abs=1e-12), "the barrier of the second: h . s <= 0"
    assert moved.tolist() == pytest.approx([0.0, 0.0])
    state = filt.state_dict()
    torch.testing.assert_close(state["averages"][1][0], average)
    assert filt.anchor.measured_at == [r, r]
    assert filt.anchor.mean_distances == [0.75 * r, 0.5 * r]


def test_relief_is_of_sets_that_rest():
    """What the correction took of the second, 1 - 0, is subtracted until it is measured; the first's is forgotten."""
    filt, p = filtered()
    h = [[torch.tensor([1.0, 0.0], dtype=F64)], [torch.tensor([0.0, 1.0], dtype=F64)]]
    step(filt, p, [-1.0, -1.0], [-9.0, -9.0], h, None)
    filt.anchor.mean_distances = [0.5 * filt.anchor.distance] * 2  # of the average of 0 and h
    step(filt, p, [0.0, 0.0], [0.02, None], [h[0], None], [0.02, 0.03])
    assert filt.state_dict()["relief"][1] == pytest.approx(0.03)
    filt.anchor.mean_distances[1] = 0.5 * filt.anchor.distance
    step(filt, p, [0.0, 0.0], [0.02, None], [h[0], None], [0.02, 0.03])
    assert filt.last_event.values == pytest.approx((0.02, 0.0))
    step(filt, p, [0.0, 0.0], [0.02, 0.01], h, None)
    assert filt.last_event.values == pytest.approx((0.02, 0.01))


def test_a_set_without_an_average_must_be_measured():
    """At the first step; where all measurements were at theta_0; and in a filter whose averages follow no distance."""
    h: list[Any] = [[torch.tensor([1.0, 0.0], dtype=F64)], [torch.tensor([0.0, 1.0], dtype=F64)]]
    for verified, steps in ((True, 0), (True, 1), (False, 3)):
        p = torch.nn.Parameter(torch.zeros(2, dtype=F64))
        filt = hf.SafetyFilter(torch.optim.SGD([p], lr=0.1), gradient_decay=0.5, verified=verified)
        for _ in range(steps):
            step(filt, p, [-1.0, -1.0], [-9.0, -9.0], h, None)
        with pytest.raises(ConfigError, match="constraint 2 is not measured, and there is no average"):
            filt.arm([-1.0, None], [h[0], None], [-1.0, -1.0])


@pytest.mark.parametrize("bad", [{"rest": 0, "verify": 4}, {"rest": 2}, {"rest": 2, "verify": 4, "estimator": "batch"}])
def test_it_needs_averages_that_follow_the_distance(tmp_path, bad):
    with pytest.raises(ConfigError, match=f"rest is {bad['rest']}"):
        build(tmp_path, given={"defense": {"name": "holdfast", **bad}})


@pytest.mark.parametrize("engine", ["two_pass", "fused"])
def test_a_set_at_ease_rests_and_one_near_its_limit_does_not(tmp_path, monkeypatch, engine):
    given = {"safety_dataset": SETS, "constraint": LIMITS, "defense": RESTING}
    options = {"max_steps": 24, "learning_rate": 1e-3, "safety_batch_size": 4, "step": engine}
    trainer = build(tmp_path, given=given, **options)
    measured: list[list[str]] = []
    theirs = type(trainer.run.engine).measure

    def watched(self, terms):
        measured.append(list(terms))
        return theirs(self, terms)

    monkeypatch.setattr(type(trainer.run.engine), "measure", watched)
    trainer.train()
    steps = measured if engine == "two_pass" else [names for names in measured if names]
    assert all("near" in names for names in steps)
    resting = [i for i, names in enumerate(steps) if "far" not in names]
    assert len(resting) >= 5
    assert all(i % 3 for i in resting)
    rows = event_log.read(tmp_path / "run" / "events.jsonl")
    far = [row["constraints"]["far"] for row in rows]
    assert [i for i, one in enumerate(far) if one["violation_rate"] is None] == resting
    assert all(one["g"] < 0 for one in far)


def test_both_engines_take_the_same_steps(tmp_path):
    ends = {}
    for engine in ("two_pass", "fused"):
        given = {"safety_dataset": SETS, "constraint": LIMITS, "defense": RESTING}
        trainer = build(tmp_path / engine, given=given, max_steps=8, safety_batch_size=4, step=engine, optim="sgd")
        trainer.train()
        ends[engine] = weights(trainer)
        assert isinstance(trainer.run.engine, TwoPassEngine) == (engine == "two_pass")
    for name, theta in ends["two_pass"].items():
        torch.testing.assert_close(ends["fused"][name], theta, rtol=1e-4, atol=1e-6)


def test_what_skipping_goes_by_is_of_measured_sets_alone(tmp_path, monkeypatch):
    """Else a resumed run, which does not know an old share, would lay out its batches otherwise."""
    given = {"safety_dataset": SETS, "constraint": LIMITS, "defense": {**RESTING, "every": 2}}
    trainer = build(tmp_path, given=given, max_steps=14, learning_rate=1e-4, safety_batch_size=4)
    shares: list[tuple[bool, float]] = []
    defense: Any = trainer.defense
    theirs = defense.on_gradient

    def watched(run):
        nothing = not defense._terms(run)
        theirs(run)
        shares.append((nothing, defense._inactive))

    monkeypatch.setattr(defense, "on_gradient", watched)
    trainer.train()
    assert any(nothing for nothing, _ in shares)
    pairs = itertools.pairwise(shares)
    assert all(now == before for (_, before), (nothing, now) in pairs if nothing)


def test_without_rest_all_are_measured_and_nothing_changes(tmp_path):
    ends = []
    for i, options in enumerate([{"verify": 4}, {"verify": 4, "rest": 1}]):
        given = {"safety_dataset": SETS, "constraint": LIMITS, "defense": {"name": "holdfast", **options}}
        trainer = build(tmp_path / str(i), given=given, max_steps=6, safety_batch_size=4)
        trainer.train()
        ends.append(weights(trainer))
    assert same(*ends)
