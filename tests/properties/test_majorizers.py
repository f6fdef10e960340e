"""Every registered majorizer lies above the indicator, never falls, and knows its feasible start."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.constraint.majorizers import MAJORIZERS, Majorizer, capped_ramp, log_ramp, ramp
from holdfast.core.errors import ConfigError

ALL = [entry for _, entry in MAJORIZERS.items()]
NOT_CONVEX = ("sigmoid", "log_ramp", "capped_ramp")
every = pytest.mark.parametrize("phi", ALL, ids=lambda entry: entry.name)
few = settings(max_examples=40)  # of up to thirty points each

betas = st.floats(0.1, 50.0)
# beta * z stays below 500: the exponential's float64 overflow is documented behaviour, tested on its own.
points = st.lists(st.floats(-10.0, 10.0), min_size=1, max_size=30)
levels = st.floats(1e-3, 0.999)


def test_the_registry_holds_those_of_the_design() -> None:
    assert list(MAJORIZERS) == [
        "capped_ramp", "cvar", "entropic", "exponential", "log_ramp", "ramp", "sigmoid", "softplus", "squared_hinge",
    ]  # fmt: skip


@every
@few
@given(z=points, beta=betas)
def test_lies_above_the_indicator(phi: Majorizer, z: list[float], beta: float) -> None:
    x = torch.tensor(z, dtype=torch.float64)
    assert (phi(x, beta) >= (x > 0).double()).all()


@every
@few
@given(z=points, beta=betas)
def test_never_falls(phi: Majorizer, z: list[float], beta: float) -> None:
    x = torch.tensor(z, dtype=torch.float64).sort().values
    assert (phi(x, beta).diff() >= 0).all()


@every
@few
@given(beta=betas)
def test_is_one_at_zero(phi: Majorizer, beta: float) -> None:
    assert phi(torch.zeros(1, dtype=torch.float64), beta).item() == pytest.approx(1.0, abs=1e-15)


@every
@few
@given(tau=st.floats(1e-3, 10.0), level=levels)
def test_smallest_beta_is_the_boundary_of_the_feasible_start(phi: Majorizer, tau: float, level: float) -> None:
    beta = phi.smallest_beta(tau, level)
    start = torch.tensor([-tau], dtype=torch.float64)
    assert phi(start, beta).item() == pytest.approx(level, rel=1e-9)
    assert phi(start, beta * 1.001).item() < level
    assert phi(start, beta * 0.999).item() > level


@pytest.mark.parametrize(
    ("name", "product"),
    [
        ("ramp", 0.95),
        ("cvar", 0.95),
        ("log_ramp", 0.95),
        ("capped_ramp", 0.95),
        ("squared_hinge", 0.7763932),
        ("exponential", 2.9957323),
        ("entropic", 2.9957323),
        ("softplus", -math.log(2**0.05 - 1)),
        ("sigmoid", 3.6635616),
    ],
)
def test_start_rules_at_alpha_five_percent(name: str, product: float) -> None:
    assert MAJORIZERS[name].smallest_beta(1.0, 0.05) == pytest.approx(product, abs=1e-6)


@every
def test_at_tau_zero_no_beta_is_feasible(phi: Majorizer) -> None:
    assert phi.smallest_beta(0.0, 0.05) == math.inf


@every
@few
@given(z=points, beta=betas)
def test_gradient_is_finite_nonnegative_and_the_slope(phi: Majorizer, z: list[float], beta: float) -> None:
    x = torch.tensor(z, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(phi(x, beta).sum(), x)
    assert slope.isfinite().all()
    assert (slope >= 0).all()
    # A non-decreasing function's secants are the oracle, away from the ramp's kink.
    step = 1e-6
    away = (1 + beta * x).abs() > 2 * beta * step
    if phi is capped_ramp:  # beyond its cap the derivative is the ramp's, on purpose
        away &= x < -2 * step
    secant = (phi(x + step, beta) - phi(x - step, beta)) / (2 * step)
    scale = 1 + slope.abs() + phi(x, beta) * beta
    assert ((secant - slope).abs() <= 1e-6 * scale * (1 + beta * beta))[away].all()


@every
def test_no_nan_far_out(phi: Majorizer) -> None:
    x = torch.tensor([-1e30, -1e4, 1e4, 1e30], dtype=torch.float32, requires_grad=True)
    out = phi(x, 10.0)
    assert not out.isnan().any()
    assert out[:2].tolist() == [0.0, 0.0]
    (slope,) = torch.autograd.grad(out.sum(), x)
    assert not slope.isnan().any()


@every
def test_never_falls_on_a_fine_grid(phi: Majorizer) -> None:
    # Implementations that switch formula may drop by a hair where they switch.
    for point in (20.0, 40.0):
        x = torch.linspace(point - 1e-8, point + 1e-8, 41, dtype=torch.float64)
        assert (phi(x, 1.0).diff() >= 0).all()


def test_ramp_has_derivative_zero_at_the_kink() -> None:
    z = torch.tensor([-0.125], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(ramp(z, 8.0).sum(), z)
    assert slope.item() == 0.0


@pytest.mark.parametrize(
    "phi", [e for e in ALL if e.name not in ("sigmoid", "log_ramp", "capped_ramp")], ids=lambda entry: entry.name
)
@few
@given(z=points, beta=betas)
def test_no_convex_majorizer_is_tighter_than_the_ramp_of_equal_slope(
    phi: Majorizer, z: list[float], beta: float
) -> None:
    zero = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(phi(zero, beta).sum(), zero)
    x = torch.tensor(z, dtype=torch.float64)
    assert (phi(x, beta) >= ramp(x, slope.item()) * (1 - 1e-12) - 1e-12).all()


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="softplus"):
        MAJORIZERS["softpluss"]


@given(z=points, beta=betas)
def test_log_ramp_is_the_ramp_up_to_tau_and_its_logarithm_beyond(z: list[float], beta: float) -> None:
    for x in z:
        line = max(1 + beta * x, 0.0)
        found = log_ramp(torch.tensor(x, dtype=torch.float64), beta).item()
        assert found == pytest.approx(line if x <= 0 else 1 + math.log(line), rel=1e-12)


def test_log_ramp_has_no_jump_in_its_slope_at_tau() -> None:
    z = torch.tensor([-1e-9, 0.0, 1e-9], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(log_ramp(z, 100.0).sum(), z)
    assert slope.tolist() == pytest.approx([100.0] * 3, rel=1e-6)


@given(z=points, beta=betas)
def test_capped_ramp_has_the_value_of_the_cap_and_the_derivative_of_the_ramp(z: list[float], beta: float) -> None:
    x = torch.tensor(z, dtype=torch.float64, requires_grad=True)
    assert capped_ramp(x, beta).equal(ramp(x, beta).clamp(max=1))
    found, expected = (torch.autograd.grad(phi(x, beta).sum(), x)[0] for phi in (capped_ramp, ramp))
    assert found.equal(expected)
    assert capped_ramp(torch.tensor(1e30), beta).item() == 1.0


@pytest.mark.parametrize(("phi", "flips"), [(ramp, True), (capped_ramp, False), (log_ramp, False)])
def test_one_lost_example_of_a_thousand(phi: Majorizer, flips: bool) -> None:
    """D = 50 with tau 0.01 and alpha 0.05: it must not use up the limit alone, and must be pulled back."""
    d = torch.zeros(1000, dtype=torch.float64)
    d[0] = 50.0
    z = (d - 0.01).requires_grad_()
    mean = phi(z, 100.0).mean()
    assert (mean.item() > 0.05) == flips
    (slope,) = torch.autograd.grad(mean, z)
    assert slope[0] > 0
