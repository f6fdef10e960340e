"""The entropic constraint in training: the filter gets value and gradient of log(mean exp(beta z) / alpha) / beta.

The oracle is autograd through `torch.logsumexp` on the degradations of the whole safety set, at each step's weights.
"""

from __future__ import annotations

import math

import pytest
import torch

import holdfast as hf
from holdfast.constraint.filter import SafetyFilter
from holdfast.core.errors import InfeasibleError
from holdfast.core.event_log import read
from holdfast.data.encode import collate
from holdfast.scoring.completion import deterministic
from holdfast.scoring.degradation import degradation
from holdfast.training.steering import Steering
from holdfast.training.step import Measured
from tests import tiny
from tests.unit.trainers.building import build

ROWS = 6
BUFFER, ALPHA = 0.01, 0.2


def limit(beta: float = 400.0, **fields) -> hf.ChanceConstraint:
    """Sharp: rows differ by several e-folds after few steps."""
    given = {"tau": 0.01, "alpha": ALPHA, "beta": beta, "unit": "nll_token", "buffer": BUFFER, "majorizer": "entropic"}
    return hf.ChanceConstraint(**{**given, **fields})


def made(folder, constraint, *, defense=None, **options) -> hf.SafeSFTTrainer:
    rows = {"constraint": list(tiny.dataset(ROWS, seed=2))}
    chosen = {"name": "holdfast", "estimator": "batch", **(defense or {})}
    given = {"constraint": constraint, "safety_dataset": rows, "defense": chosen}
    options = {"max_steps": 5, "learning_rate": 0.05, "optim": "sgd", "safety_batch_size": ROWS, **options}
    return build(folder, given=given, safety_micro_batch_size=4, **options)


def oracle(trainer) -> tuple[float, torch.Tensor]:
    """Value with the buffer, and gradient, by autograd over the whole set."""
    one = trainer.safety["safety"]
    with deterministic(trainer.model):
        d = degradation(trainer.model, collate(one.constraint_set, 0), one.constraint_reference, one.constraint)
    c = one.constraint
    g = (torch.logsumexp(c.beta * (d - c.tau), 0) - math.log((c.alpha - c.buffer) * ROWS)) / c.beta
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    return float(g.detach()), torch.cat([x.flatten() for x in torch.autograd.grad(g, parameters)])


@pytest.mark.parametrize("step", ["two_pass", "fused"])
def test_the_filter_gets_value_and_gradient_of_the_log_form(tmp_path, monkeypatch, step):
    trainer, seen = made(tmp_path, limit(), step=step), []
    arm = SafetyFilter.arm

    def compared(self, values, gradients, estimates, limits, verify):
        found = torch.cat([x.flatten().clone() for x in gradients[0]])
        seen.append((values[0], estimates[0], found, *oracle(trainer)))
        arm(self, values, gradients, estimates, limits, verify)

    monkeypatch.setattr(SafetyFilter, "arm", compared)
    trainer.train()
    assert len(seen) == 5
    for value, estimate, found, expected, gradient in seen:
        assert value == pytest.approx(expected, abs=1e-6)
        assert estimate == pytest.approx(expected, abs=1e-6)
        assert float((found - gradient).norm()) <= 1e-4 * float(gradient.norm())
    spread = max(expected for *_, expected, _ in seen) - seen[0][3]
    assert spread * 400.0 > 1.0, "the weights of the rows have come to differ"


def test_it_steers_where_the_exponential_cannot(tmp_path):
    """beta z beyond 88: the exponential's slopes are not finite in float32, and its steps are discarded."""
    sharp = {"beta": 2e5, "tau": 0.001, "buffer": 0.0}
    rows = {}
    for name in ("entropic", "exponential"):
        trainer = made(tmp_path / name, limit(**sharp, majorizer=name), max_steps=3)
        trainer.train()
        rows[name] = read(trainer.run_dir / "events.jsonl")
    assert "nonfinite" not in {row["event"] for row in rows["entropic"]}
    assert max(row["g"] for row in rows["entropic"]) * 2e5 > 88
    assert "nonfinite" in {row["event"] for row in rows["exponential"]}


def test_a_row_far_above_the_average_has_a_finite_weight(tmp_path):
    """The first sight of a row e^600 above the mean, the second, and batches that are as far below it, unequal too."""
    trainer = made(tmp_path, limit(beta=200.0), defense={"estimator": "ema"})
    steering = Steering(trainer.safety["safety"], trainer.defense.config)
    d = torch.zeros(ROWS, dtype=torch.float64)
    index = torch.arange(ROWS)
    for worst, other in ((0.0, 0.0), (3.0, 0.0), (3.0, 0.0), (0.0, 0.05), (0.0, 0.0)):
        d = d.detach().clone()
        d[0], d[1] = worst, other
        d.requires_grad_()
        slopes = torch.autograd.grad(steering.terms(d).mean(), d)[0].float()
        value, estimate = steering.estimate(Measured(index, d.detach(), [slopes]))
        torch.testing.assert_close(slopes, torch.softmax(200.0 * d.detach(), 0).float(), rtol=1e-6, atol=1e-9)
        assert value == pytest.approx(float(torch.logsumexp(200.0 * (d.detach() - 0.01), 0) - math.log(0.19 * 6)) / 200)
        mean = steering.estimator.state_dict()["mean"]
        assert estimate == pytest.approx(math.log(mean / (ALPHA - BUFFER)) / 200)
    state = steering.state_dict()
    assert math.isnan(steering.estimate(Measured(index, d.detach() + math.inf, [slopes]))[0])
    assert steering.state_dict() == state, "nothing of it is remembered"
    again = Steering(trainer.safety["safety"], trainer.defense.config)
    again.load_state_dict(steering.state_dict())
    assert torch.equal(again.terms(d), steering.terms(d))


@pytest.mark.parametrize(("fields", "reserve"), [({"beta": 200.0}, 0.3), ({"buffer": 0.15}, 0.3)])
def test_a_reserve_that_leaves_no_room_for_the_start_is_refused(tmp_path, fields, reserve):
    """phi(-tau) is exp(-2) = 0.135: below alpha, not below what the reserve leaves of it. Nothing could be learned."""
    with pytest.raises(InfeasibleError, match=r"reserve 0\.3 makes the start infeasible"):
        made(tmp_path, limit(**fields), defense={"reserve": reserve}).train()


def test_a_reserve_that_leaves_nothing_is_refused_where_an_infeasible_start_is_allowed(tmp_path):
    fields = limit(beta=50.0, buffer=0.15, allow_infeasible_start=True)
    with pytest.raises(InfeasibleError, match=r"reserve 0\.5 makes the start infeasible.*leave 0\n"):
        made(tmp_path, fields, defense={"reserve": 0.5}).train()
