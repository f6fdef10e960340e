"""`preset: paper` on a two-parameter example computed by hand with Algorithm 1.

One safety example with loss theta_1 (reference 0), so D = theta_1. At theta = (0.12, 1), tau = 0.1, beta = 10,
alpha = 0.05:

    phi = 1 + 10 (0.12 - 0.1) = 1.2        g = 1.2 - 0.05 = 1.15        grad g = (10, 0)
    grad f = (-1, 2)    lr = 0.1    kappa = 1 / lr = 10
    lambda = (-grad g . grad f + kappa g) / |grad g|^2 = (10 + 11.5) / 100 = 0.215
    d = -grad f - lambda grad g = (1 - 2.15, -2) = (-1.15, -2)
    theta <- theta + lr d = (0.005, 0.8)   and there g = 1 + 10 (0.005 - 0.1) - 0.05 = 0 : deadbeat
"""

from __future__ import annotations

import pytest
import torch

from holdfast.constraint.chance import ChanceConstraint
from holdfast.constraint.filter import SafetyFilter
from holdfast.defenses.holdfast import Holdfast
from holdfast.runs.config.presets import PAPER


def block(name: str) -> dict:
    return {v.key.split(".")[1]: v.value for v in PAPER if v.key.startswith(f"{name}.")}


def paper_filter(optimizer) -> SafetyFilter:
    config = Holdfast.Config(**block("defense"))
    assert config.estimator == "batch"
    return SafetyFilter(optimizer, rate=config.rate, space=config.space)


def test_algorithm_1_by_hand():
    constraint = ChanceConstraint(**block("constraint"))
    theta = torch.nn.Parameter(torch.tensor([0.12, 1.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([theta], lr=0.1)
    filt = paper_filter(optimizer)
    theta.grad = torch.tensor([-1.0, 2.0], dtype=torch.float64)
    event = filt.step(constraint.value(theta[:1]))
    assert event.values == pytest.approx((1.15,))
    assert event.multipliers == pytest.approx((0.215,))
    assert theta.detach().tolist() == pytest.approx([0.005, 0.8])
    assert float(constraint.value(theta.detach()[:1])) == pytest.approx(0.0, abs=1e-12)


def test_the_start_sits_on_the_kink_and_is_inactive():
    """At theta_0 every D is 0 and beta tau = 1: the ramp's derivative there is 0, so the first step is plain SFT."""
    constraint = ChanceConstraint(**block("constraint"))
    theta = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    filt = paper_filter(torch.optim.SGD([theta], lr=0.1))
    theta.grad = torch.tensor([-1.0, 2.0], dtype=torch.float64)
    event = filt.step(constraint.value(theta[:1]))
    assert (str(event.name), event.values) == ("inactive", (-0.05,))
    assert theta.detach().tolist() == pytest.approx([0.1, -0.2])


def test_the_paper_s_constants():
    values = {v.key: v.value for v in PAPER}
    assert [values[f"constraint.{k}"] for k in ("tau", "beta", "alpha", "unit")] == [0.1, 10.0, 0.05, "nll_sum"]
    assert [values[f"lora.{k}"] for k in ("r", "alpha", "dropout")] == [32, 4, 0.05]
    assert [values[f"train.{k}"] for k in ("learning_rate", "weight_decay", "num_train_epochs", "max_length")] == [
        1e-5,
        0.1,
        20,
        512,
    ]
    assert all(v.source for v in PAPER)
