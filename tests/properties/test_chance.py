"""The chance constraint: equivalences with CVaR and entropic risk, refusals, and the words in them."""

import dataclasses
import inspect
import logging
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdfast.constraint.chance import ChanceConstraint
from holdfast.constraint.feasibility import (
    FLAT,
    free_degradation,
    likelihood_note,
    require_feasible_start,
    require_tau_above_noise,
    smallest_beta,
    unreachable,
    warn_of_free_degradation,
    warn_of_noise,
)
from holdfast.constraint.majorizers import MAJORIZERS
from holdfast.core.errors import ConfigError, DataError, InfeasibleError, UnsupportedError
from holdfast.core.units import UNITS

degradations = st.lists(st.floats(-5.0, 5.0), min_size=1, max_size=40).map(
    lambda values: torch.tensor(values, dtype=torch.float64)
)
alphas = st.floats(0.01, 0.9)
taus = st.floats(0.01, 2.0)
betas = st.floats(0.1, 50.0)


# Equivalences


@given(D=degradations, tau=taus, alpha=alphas, beta=betas)
def test_g_below_zero_implies_the_chance_constraint(D: Tensor, tau: float, alpha: float, beta: float) -> None:
    for name in MAJORIZERS:
        constraint = ChanceConstraint(tau, alpha, name, beta, unit="nll_token")
        g = constraint.value(D).item()
        bound = alpha * math.exp(min(beta * g, 700.0)) if name == "entropic" else g + alpha
        assert constraint.violation_rate(D) <= bound * (1 + 1e-12) + 1e-12


@given(D=degradations, tau=taus, alpha=alphas, beta=betas)
def test_entropic_has_the_feasible_points_of_the_exponential(D: Tensor, tau: float, alpha: float, beta: float) -> None:
    log_form, plain = (
        ChanceConstraint(tau, alpha, name, beta, unit="nll_token") for name in ("entropic", "exponential")
    )
    g, expected = log_form.value(D).item(), np.log(np.mean(np.exp(beta * (D.numpy() - tau))) / alpha) / beta
    assert g == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assume(abs(g) > 1e-9)
    assert (g <= 0) == (plain.value(D).item() <= 0)
    assert log_form.feasible_start == plain.feasible_start


def test_entropic_is_finite_where_the_exponential_overflows() -> None:
    """Value and slopes in float32, against the softmax of float64 numbers shifted by hand."""
    values = [0.0, 9.0, 9.1, 40.0]
    D = torch.tensor(values, dtype=torch.float32, requires_grad=True)
    constraint = ChanceConstraint(0.1, 0.05, "entropic", 50.0)
    (slopes,) = torch.autograd.grad(constraint.value(D), D)
    weights = np.exp(50.0 * (np.array(values) - 40.0))
    assert constraint.value(D).item() == pytest.approx(39.9 + math.log(weights.mean() / 0.05) / 50.0, rel=1e-6)
    assert slopes.tolist() == pytest.approx((weights / weights.sum()).tolist(), abs=1e-6)
    assert math.isinf(ChanceConstraint(0.1, 0.05, "exponential", 50.0).value(D).item())


@given(D=degradations, tau=taus, alpha=alphas, beta=betas)
def test_ramp_is_rockafellar_uryasev_with_a_frozen_t(D: Tensor, tau: float, alpha: float, beta: float) -> None:
    constraint = ChanceConstraint(tau, alpha, "ramp", beta, unit="nll_token")
    t = tau - 1 / beta
    left = t + np.maximum(D.numpy() - t, 0).mean() / alpha
    g = constraint.value(D).item()
    assert g == pytest.approx(alpha * beta * (left - tau), rel=1e-9, abs=1e-9)
    if abs(left - tau) > 1e-9 * (1 + abs(left)):
        assert np.sign(g) == np.sign(left - tau)


@given(D=degradations, alpha=alphas)
@example(D=torch.arange(20, dtype=torch.float64), alpha=0.05)
@example(D=torch.arange(10, dtype=torch.float64), alpha=0.25)
def test_cvar_is_the_minimum_over_t(D: Tensor, alpha: float) -> None:
    x = D.numpy()
    # The minimum of a piecewise linear function is at one of its breakpoints.
    smallest = min(t + np.maximum(x - t, 0).mean() / alpha for t in x)
    assert ChanceConstraint(alpha=alpha, unit="nll_token").cvar(D) == pytest.approx(smallest, rel=1e-9, abs=1e-9)


def test_cvar_counts_the_last_example_of_the_tail_in_part() -> None:
    D = torch.arange(10, dtype=torch.float64)
    assert ChanceConstraint(alpha=0.25, unit="nll_token").cvar(D) == pytest.approx((9 + 8 + 0.5 * 7) / 2.5)


@given(D=degradations)
def test_the_headline_setting_is_a_rectified_mean(D: Tensor) -> None:
    constraint = ChanceConstraint(tau=0.1, alpha=0.05, majorizer="ramp", beta=10.0, unit="nll_token")
    rectified = np.maximum(D.numpy(), 0).mean()
    assume(abs(rectified - 0.005) > 1e-12)
    assert (constraint.value(D).item() <= 0) == (rectified <= 0.005)
    assert constraint.value(D).item() == pytest.approx(10 * rectified - 0.05, abs=1e-12)


@given(D=degradations, tau=taus, alpha=alphas, share=st.floats(0.1, 1.0))
def test_in_kl_without_a_flat_part_it_is_a_bound_on_the_mean(D: Tensor, tau: float, alpha: float, share: float) -> None:
    """And nothing else: the two constraints have the same feasible points."""
    D = D.abs()
    constraint = ChanceConstraint(tau, alpha, "ramp", share / tau, unit="kl_token")
    bound, expected = constraint.mean_bound, alpha * tau - (1 - share) * (tau / share) * (1 - alpha)
    if bound is None:  # no model has a mean below 0, and the start is infeasible
        assert expected <= 1e-9
        assert constraint.value(D).item() > -1e-6
        return
    assert bound == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assume(abs(D.mean().item() - bound) > 1e-9)
    assert (constraint.value(D).item() <= 0) == (D.mean().item() <= bound)


# Ten examples, mean KL 0.01: all of them moved a little, or one of them by tau.
EVEN, ONE = torch.full((10,), 0.01, dtype=torch.float64), torch.tensor([0.1] + 9 * [0.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("majorizer", "beta", "even", "one"),
    [
        ("ramp", 10.0, 0.0, 0.0),  # beta tau = 1: the mean cannot tell them apart
        ("ramp", 20.0, -0.1, 0.0),  # t = 0.05: only the tail counts
        ("cvar", 10.0, 0.0, 0.0),  # t = 0, where it begins; it follows the quantile
        ("exponential", 30.0, math.exp(-2.7) - 0.1, 0.9 * math.exp(-3.0)),
        ("squared_hinge", 10.0, 0.01 - 0.1, 0.0),
    ],
)
def test_which_settings_tell_a_tail_from_a_mean(majorizer: str, beta: float, even: float, one: float) -> None:
    constraint = ChanceConstraint(0.1, 0.1, majorizer, beta)
    assert constraint.value(EVEN).item() == pytest.approx(even, abs=1e-12)
    assert constraint.value(ONE).item() == pytest.approx(one, abs=1e-12)
    assert (constraint.mean_bound is None) == ((majorizer, beta) != ("ramp", 10.0))


def test_below_the_threshold_nothing_pulls_and_above_it_all_rows_pull_alike() -> None:
    for beta, slopes in ((10.0, [1.0, 1.0, 1.0]), (20.0, [0.0, 0.0, 2.0])):
        D = torch.tensor([0.01, 0.04, 0.08], dtype=torch.float64, requires_grad=True)
        (found,) = torch.autograd.grad(ChanceConstraint(0.1, 0.1, "ramp", beta).value(D), D)
        assert (found * 3 / 10).tolist() == pytest.approx(slopes)


@given(D=degradations, tau=taus, alpha=alphas, share=st.floats(0.05, 0.95))
def test_the_price_of_a_tail_constraint_is_the_mean(D: Tensor, tau: float, alpha: float, share: float) -> None:
    """Every example may move by t at no cost, and g <= 0 allows means up to t + alpha (tau - t)."""
    t = share * tau
    constraint = ChanceConstraint(tau, alpha, "ramp", 1 / (tau - t), unit="kl_token")
    assert constraint.value(torch.full((9,), t, dtype=torch.float64)).item() == pytest.approx(-alpha, abs=1e-6)
    bound = t + alpha * (tau - t)
    if constraint.value(D.abs()).item() <= 0:
        assert D.abs().mean().item() <= bound + 1e-9
    assert constraint.value(torch.full((9,), bound, dtype=torch.float64)).item() == pytest.approx(0.0, abs=1e-9)


def test_value_is_differentiable_and_weights_the_violator() -> None:
    D = torch.tensor([-1.0, 0.5], dtype=torch.float64, requires_grad=True)
    ChanceConstraint(unit="nll_token").value(D).backward()
    assert D.grad is not None
    assert D.grad.tolist() == [0.0, 5.0]


def test_violation_is_strict_and_nan_counts_as_one() -> None:
    D = torch.tensor([0.25, 0.2500001, -9.0, math.nan], dtype=torch.float64)
    assert ChanceConstraint(tau=0.25, unit="nll_token").violation_rate(D) == 0.5


# Start


@pytest.mark.parametrize("name", list(MAJORIZERS))
@settings(max_examples=50)
@given(tau=taus, alpha=alphas, beta=betas, share=st.floats(0.0, 0.9))
def test_feasible_start_is_the_start_rule(name: str, tau: float, alpha: float, beta: float, share: float) -> None:
    constraint = ChanceConstraint(tau, alpha, name, beta, buffer=share * alpha, unit="nll_token")
    smallest = smallest_beta(constraint)
    if name != "entropic":
        assert constraint.start_value() == pytest.approx(
            constraint.value(torch.zeros(7, dtype=torch.float64)).item(), abs=1e-12
        )
    if name == "cvar":
        assert constraint.feasible_start
        return
    assume(abs(constraint.beta / smallest - 1) > 1e-6)
    assert constraint.feasible_start == (constraint.beta > smallest)
    assert dataclasses.replace(constraint, beta=smallest).feasible_start


@pytest.mark.parametrize("name", [n for n in MAJORIZERS if n != "cvar"])
@settings(max_examples=50)
@given(tau=taus, alpha=st.floats(0.01, 0.5))
def test_the_beta_named_in_the_refusal_is_accepted(name: str, tau: float, alpha: float) -> None:
    constraint = ChanceConstraint(tau, alpha, name, beta=1e-3, unit="nll_token")
    with pytest.raises(InfeasibleError) as refusal:
        require_feasible_start(constraint)
    named = re.search(r"beta >= ([0-9.e+-]+)", refusal.value.remedy)
    assert named is not None
    repaired = dataclasses.replace(constraint, beta=float(named[1]))
    require_feasible_start(repaired)
    assert repaired.beta <= smallest_beta(constraint) * 1.002


def test_the_infeasible_start_is_refused_with_its_numbers() -> None:
    constraint = ChanceConstraint(majorizer="exponential", buffer=0.01, unit="nll_token")
    with pytest.raises(InfeasibleError) as refusal:
        require_feasible_start(constraint)
    for part in ("0.367879", "0.04", "32.19", "allow_infeasible_start"):
        assert part in str(refusal.value)
    require_feasible_start(dataclasses.replace(constraint, allow_infeasible_start=True))


def test_a_kl_constraint_that_no_model_meets_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """phi(D - tau) grows with D, and D = KL >= 0: what the unchanged model misses, every model misses."""
    constraint = ChanceConstraint(tau=0.05, beta=10.0, unit="kl_token")
    least = constraint.start_value()
    assert all(
        float(constraint.value(torch.full((3,), d, dtype=torch.float64))) >= least for d in (0.0, 1e-6, 0.1, 2.0)
    )
    assert unreachable(constraint)
    with pytest.raises(InfeasibleError) as refusal:
        require_feasible_start(constraint)
    assert "beta >= 19" in refusal.value.remedy
    assert "allow_infeasible_start" not in refusal.value.remedy
    with caplog.at_level(logging.WARNING):
        require_feasible_start(dataclasses.replace(constraint, allow_infeasible_start=True))
    assert "no model meets g + buffer <= 0" in caplog.text
    assert not unreachable(dataclasses.replace(constraint, unit="nll_token"))
    assert not unreachable(dataclasses.replace(constraint, beta=20.0))


@pytest.mark.parametrize(
    "majorizer", ["ramp", "capped_ramp", "log_ramp", "squared_hinge", "exponential", "softplus", "sigmoid"]
)
def test_what_is_free_is_where_phi_is_zero(majorizer) -> None:
    constraint = ChanceConstraint(tau=0.2, beta=10.0, majorizer=majorizer, unit="kl_token")
    phi = constraint.phi(
        torch.tensor([free_degradation(constraint), free_degradation(constraint) + 1e-6], dtype=torch.float64)
    )
    if majorizer in FLAT:
        assert free_degradation(constraint) == pytest.approx(0.1)
        assert float(phi[0]) == pytest.approx(0.0, abs=1e-12)
        assert float(phi[1]) > 0
    else:
        assert free_degradation(constraint) == 0.0
        assert float(phi[0]) > 0


def test_with_beta_one_over_tau_a_kl_is_bounded_in_the_mean() -> None:
    """(1 + beta (D - tau))_+ = D / tau for D >= 0, so that g <= 0 is mean D <= alpha tau."""
    for tau in (0.05, 0.1, 0.2):
        constraint = ChanceConstraint(tau=tau, beta=1 / tau, unit="kl_token")
        kl = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        assert free_degradation(constraint) == 0.0
        assert float(constraint.value(kl)) == pytest.approx(float(kl.mean()) / tau - constraint.alpha)


@pytest.mark.parametrize(("settings", "warned"), [
    ({"tau": 0.2}, True),
    ({"beta": 20.0}, True),
    ({"tau": 0.2, "majorizer": "squared_hinge"}, True),
    ({"majorizer": "cvar"}, True),
    ({"majorizer": "cvar", "tau": 0.02}, False),
    ({}, False),
    ({"tau": 0.2, "beta": 5.0}, False),
    ({"tau": 0.2, "unit": "nll_token"}, False),
    ({"tau": 0.2, "majorizer": "exponential"}, False),
])  # fmt: skip
def test_a_kl_that_costs_nothing_is_warned_of(settings, warned, caplog) -> None:
    constraint = ChanceConstraint(**{"unit": "kl_token", **settings})
    with caplog.at_level(logging.WARNING):
        warn_of_free_degradation(constraint, "refusals")
    assert ("refusals: kl_token may cost nothing up to" in caplog.text) == warned
    if warned:
        assert f"beta: {1 / constraint.tau:g}" in caplog.text
        after = dataclasses.replace(
            constraint, majorizer="ramp" if constraint.majorizer == "cvar" else constraint.majorizer
        )
        assert free_degradation(dataclasses.replace(after, cvar_t=0.0, beta=1 / constraint.tau)) == 0.0, (
            "the remedy is one"
        )


@pytest.mark.parametrize(
    ("unit", "noted"), [("nll_token", True), ("nll_sum", True), ("nll_first", False), ("kl_token", False)]
)
def test_a_limit_on_the_likelihood_of_whole_replies_says_what_it_leaves_open(unit, noted) -> None:
    note = likelihood_note(ChanceConstraint(unit=unit))
    assert (note is not None) == noted
    assert note is None or (note.startswith(f"{unit} holds the likelihood") and "kl_token" in note)


def test_the_boundary_start_of_a_round_beta_is_feasible() -> None:
    require_feasible_start(
        ChanceConstraint(tau=0.1, alpha=0.05, beta=9.5, unit="nll_token")
    )  # 1 - 9.5 * 0.1 > 0.05 in floats
    with pytest.raises(InfeasibleError, match=r"beta 9\.5\)"):
        require_feasible_start(ChanceConstraint(tau=0.1, alpha=0.05, beta=9.499, unit="nll_token"))


def test_at_tau_zero_the_remedy_is_tau() -> None:
    with pytest.raises(InfeasibleError, match="no beta is feasible") as refusal:
        require_feasible_start(ChanceConstraint(tau=0.0, unit="nll_token"))
    assert "tau > 0" in refusal.value.remedy


def test_tau_inside_the_noise_is_refused() -> None:
    require_tau_above_noise(ChanceConstraint(tau=0.1, unit="nll_token"), 0.02)
    with pytest.raises(InfeasibleError) as refusal:
        require_tau_above_noise(ChanceConstraint(tau=0.1, unit="nll_sum"), 0.0213)
    for part in ("0.1", "0.0213", "nll_sum", "0.1065", "allow_tau_below_noise"):
        assert part in str(refusal.value)
    require_tau_above_noise(ChanceConstraint(tau=0.1, allow_tau_below_noise=True, unit="nll_token"), 0.0213)
    with pytest.raises(InfeasibleError):
        require_tau_above_noise(ChanceConstraint(unit="nll_token"), math.nan)


def test_noise_above_the_mean_that_is_allowed_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    own = ChanceConstraint(unit="kl_first", tau=0.01, beta=100.0, alpha=0.05)  # mean at most 0.0005
    warn_of_noise(own, 0.00035, "refusals")
    warn_of_noise(ChanceConstraint(unit="nll_token"), 0.01, "refusals")  # bounds no mean
    assert not caplog.records
    warn_of_noise(own, 0.0006, "refusals")
    assert "refusals: rounding moves an example by up to 0.0006 (kl_first), and on average" in caplog.text


# Cvar's threshold


def test_cvar_starts_at_zero_whatever_beta_is_given() -> None:
    constraint = ChanceConstraint(tau=0.2, majorizer="cvar", beta=999.0, unit="nll_token")
    assert constraint.beta == pytest.approx(5.0)
    assert constraint.threshold() == pytest.approx(0.0, abs=1e-15)
    assert constraint.feasible_start


@given(t=st.floats(-1.0, 1.0), tau=taus)
def test_with_threshold_clips_and_sets_beta(t: float, tau: float) -> None:
    constraint = ChanceConstraint(tau=tau, majorizer="cvar", unit="nll_token").with_threshold(t)
    clipped = min(max(t, 0.0), 0.9 * tau)
    assert constraint.cvar_t == clipped
    assert constraint.beta == 1 / (tau - clipped)
    assert constraint.threshold() == pytest.approx(clipped, abs=1e-12)
    assert dataclasses.replace(constraint, alpha=0.3).cvar_t == clipped


def test_threshold_of_the_ramp() -> None:
    constraint = ChanceConstraint(tau=0.5, beta=4.0, unit="nll_token")
    assert constraint.threshold() == 0.25
    assert constraint.threshold(8.0) == 0.375


# Border


def test_the_signature_is_the_one_in_the_contract() -> None:
    parameters = list(inspect.signature(ChanceConstraint).parameters.values())
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == [
        ("tau", 0.1),
        ("alpha", 0.05),
        ("majorizer", "ramp"),
        ("beta", 10.0),
        ("unit", "kl_token"),
        ("buffer", 0.0),
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [(name, math.nan) for name in ("tau", "alpha", "beta", "buffer", "first_k", "cvar_t")]
    + [(name, math.inf) for name in ("tau", "alpha", "beta", "buffer", "first_k")]
    + [("alpha", 0), ("alpha", 1), ("alpha", -0.1), ("tau", -1e-9), ("beta", 0.0), ("beta", -1.0)]
    + [("buffer", -1e-9), ("buffer", 0.05), ("buffer", 0.5), ("first_k", 0), ("cvar_t", 0.01)]
    + [("unit", "nll"), ("majorizer", "rampp"), ("tau", "0.1"), ("alpha", None)],
)
def test_refused_at_birth(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refusal:
        ChanceConstraint(**{field: value})
    assert str(value) in refusal.value.what
    assert refusal.value.exit_code == 2


def test_cvar_refuses_tau_zero_and_a_tail_beyond_tau() -> None:
    with pytest.raises(ConfigError, match="tau"):
        ChanceConstraint(tau=0.0, majorizer="cvar", unit="nll_token")
    with pytest.raises(ConfigError, match="cvar_t"):
        ChanceConstraint(tau=0.1, majorizer="cvar", cvar_t=0.1, unit="nll_token")


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ConfigError, match="nll_token"):
        ChanceConstraint(unit="nl_token")
    with pytest.raises(ConfigError, match="squared_hinge"):
        ChanceConstraint(majorizer="square_hinge", unit="nll_token")


@pytest.mark.parametrize("D", [torch.zeros(0), torch.zeros(2, 2), torch.zeros(3, dtype=torch.int64)])
def test_degradations_are_a_non_empty_float_vector(D: Tensor) -> None:
    constraint = ChanceConstraint(unit="nll_token")
    for method in (
        constraint.phi,
        constraint.value,
        constraint.violation_rate,
        constraint.cvar,
    ):
        with pytest.raises(DataError):
            method(D)


def test_a_tail_threshold_belongs_to_cvar() -> None:
    with pytest.raises(UnsupportedError):
        ChanceConstraint(unit="nll_token").with_threshold(0.05)


def test_describe() -> None:
    assert ChanceConstraint(unit="nll_token").describe() == (
        "at most 5% of examples may degrade by more than 0.1 nats per token (nll_token), ramp beta=10"
    )
    assert ChanceConstraint(0.2, 0.07, "cvar", unit="nll_first", buffer=0.01, first_k=4).describe() == (
        "at most 7% of examples may degrade by more than 0.2 nats per token over the first 4 tokens "
        "(nll_first), cvar t=0, buffer=0.01"
    )
    assert all(unit in ChanceConstraint(unit=unit).describe() for unit in UNITS)
    assert ChanceConstraint(0.03, beta=33.3).describe() == (
        "mean kl_token at most 0.00147, so at most 5% of examples may degrade by more than 0.03 nats of KL per token "
        "(kl_token), ramp beta=33.3"
    )
    assert ChanceConstraint(0.03, beta=50.0).describe().startswith("at most 5% of examples")
