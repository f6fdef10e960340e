"""The barrier's multipliers against a general quadratic programming solver."""

import math

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.constraint.barrier import Array, barrier_multiplier, barrier_multipliers
from holdfast.constraint.event import Event
from holdfast.core.errors import ConfigError, NumericalError

DIM = 12
rng = np.random.default_rng


def instance(seed: int, k: int, *, metric: bool) -> tuple[Array, Array, Array, Array]:
    """Gradients H with norms over four decades, a nominal step, rate * value, and the metric's diagonal M."""
    r = rng([seed, k])
    H = r.normal(size=(k, DIM)) * 10 ** r.uniform(-2, 2, size=(k, 1))
    s = r.normal(size=DIM)
    target = r.normal(size=k) * np.linalg.norm(H, axis=1)
    M = 10 ** r.uniform(-2, 2, size=DIM) if metric else np.ones(DIM)
    return H, s, target, M


def solve(H: Array, s: Array, target: Array, M: Array) -> Array:
    """min 1/2 |D - s|^2 in the metric M^-1 subject to H D <= -target, in x = M^-1/2 (D - s), rows scaled."""
    root = np.sqrt(M)
    rows, right = H * root, -target - H @ s
    norms = np.linalg.norm(rows, axis=1)
    x = cp.Variable(DIM)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x)), [(rows / norms[:, None]) @ x <= right / norms])  # type: ignore[attr-defined]
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
    assert problem.status == cp.OPTIMAL
    assert x.value is not None
    return np.asarray(s + root * x.value)


@pytest.mark.parametrize("metric", [False, True], ids=["identity", "diagonal"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_the_step_is_the_quadratic_programs(k: int, metric: bool) -> None:
    active = 0
    for seed in range(25):
        H, s, target, M = instance(seed, k, metric=metric)
        mu = barrier_multipliers(H * M @ H.T, H @ s + target)
        step = s - M * (H.T @ mu)
        expected = solve(H, s, target, M)
        # Compared in the metric in which the step is the nearest.
        error = np.linalg.norm((step - expected) / np.sqrt(M))
        assert error <= 1e-6 * np.linalg.norm((expected - s) / np.sqrt(M)) + 1e-9
        active += bool(mu.any())
    assert active >= 5


@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
def test_karush_kuhn_tucker(k: int) -> None:
    for seed in range(200):
        H, s, target, M = instance(seed, k, metric=True)
        gram, a = H * M @ H.T, H @ s + target
        mu = barrier_multipliers(gram, a)
        norms = np.sqrt(np.diagonal(gram))
        residual, scaled = (a - gram @ mu) / norms, mu * norms
        scale = 1 + np.abs(a / norms).max()
        assert (mu >= 0).all()
        assert residual.max() <= 1e-8 * scale
        assert np.abs(residual * scaled).max() <= 1e-8 * scale**2


@given(
    inner=st.floats(-1e6, 1e6),
    value=st.floats(-1e3, 1e3),
    norm_sq=st.floats(1e-12, 1e12),
    rate=st.floats(0.0, 10.0),
)
def test_one_constraint_is_the_scalar_formula(inner: float, value: float, norm_sq: float, rate: float) -> None:
    scalar = barrier_multiplier(inner=inner, value=value, norm_sq=norm_sq, rate=rate)
    (vector,) = barrier_multipliers(np.array([[norm_sq]]), np.array([inner + rate * value]))
    assert vector == pytest.approx(scalar, rel=1e-14, abs=0.0)
    assert scalar == max(0.0, inner + rate * value) / norm_sq


@pytest.mark.parametrize("factor", [1e-18, 1e-9, 1e9, 1e18])
def test_multipliers_scale_with_the_violation(factor: float) -> None:
    H, s, target, M = instance(3, 3, metric=True)
    gram, a = H * M @ H.T, np.abs(H @ s + target)
    np.testing.assert_allclose(barrier_multipliers(gram, a * factor), factor * barrier_multipliers(gram, a), rtol=1e-9)


def test_duplicated_rows_give_the_single_rows_step() -> None:
    for seed in range(50):
        H, s, target, M = instance(seed, 1, metric=True)
        target = np.abs(target) + np.abs(H @ s)
        single = barrier_multipliers(H * M @ H.T, H @ s + target)
        for weights in ([1.0, 1.0], [1.0, 3.0], [1.0, 1.0, 0.01]):
            w = np.array(weights)
            many, goal = w[:, None] * H, w * target
            mu = barrier_multipliers(many * M @ many.T, many @ s + goal)
            np.testing.assert_allclose(many.T @ mu, H.T @ single, rtol=1e-9)


def test_ridge_is_the_slack_form() -> None:
    for seed in range(20):
        H, s, target, _ = instance(seed, 3, metric=False)
        gram, a = H @ H.T, H @ s + target
        mu = cp.Variable(3)
        factor = np.linalg.cholesky(gram + 0.5 * np.eye(3)).T
        problem = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(factor @ mu) - a @ mu), [mu >= 0])  # type: ignore[attr-defined]
        problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-13, tol_gap_rel=1e-13, tol_feas=1e-13)
        ours = barrier_multipliers(gram, a, ridge=0.5)

        def dual(m: Array, gram: Array = gram, a: Array = a) -> float:
            return float(0.5 * m @ (gram @ m) + 0.25 * m @ m - a @ m)

        assert dual(ours) <= dual(np.maximum(mu.value, 0)) + 1e-9 * (1 + abs(problem.value))


def test_a_decayed_constraint_does_not_drown_the_active_one() -> None:
    H = np.array([[1.0, 0.5, 0.0], [3e-20, 1e-20, 2e-20]])
    mu = barrier_multipliers(H @ H.T, np.array([1e-3, -0.015]))
    np.testing.assert_allclose(mu, [1e-3 / 1.25, 0.0], rtol=1e-12)


def test_a_satisfied_constraint_that_the_correction_breaks_is_taken_in() -> None:
    H = np.array([[1.0, 0.0], [-1.0, 1.0]])
    a = np.array([1.0, -0.5])
    mu = barrier_multipliers(H @ H.T, a)
    step = -H.T @ mu
    np.testing.assert_allclose(H @ step, -a, atol=1e-12)  # both hold with equality
    assert (mu > 0).all()


def test_degenerate_rows() -> None:
    zero = np.diag([0.0, 4.0])
    assert barrier_multipliers(zero, np.array([1.0, 2.0])).tolist() == [math.inf, 0.5]
    assert barrier_multipliers(zero, np.array([-1.0, 2.0])).tolist() == [0.0, 0.5]
    assert barrier_multipliers(zero, np.array([0.0, -2.0])).tolist() == [0.0, 0.0]
    assert barrier_multipliers(zero, np.array([1.0, 2.0]), ridge=0.5).tolist() == pytest.approx([2.0, 4 / 9])
    assert barrier_multipliers(np.zeros((0, 0)), np.zeros(0)).shape == (0,)


def test_contradictory_constraints_are_reported() -> None:
    gram = np.array([[1.0, -1.0], [-1.0, 1.0]])
    assert np.isinf(barrier_multipliers(gram, np.array([1.0, 1.0]))).any()
    assert np.isinf(barrier_multipliers(gram, np.array([1.0, -0.5]))).any()
    assert barrier_multipliers(gram, np.array([1.0, -1.5])).tolist() == pytest.approx([1.0, 0.0])
    assert np.isfinite(barrier_multipliers(gram, np.array([1.0, 1.0]), ridge=0.1)).all()


def test_scalar_degenerate_cases() -> None:
    assert barrier_multiplier(inner=-1.0, value=0.5, norm_sq=0.0, rate=1.0) == 0.0
    assert barrier_multiplier(inner=0.0, value=0.0, norm_sq=0.0, rate=0.0) == 0.0
    assert barrier_multiplier(inner=0.0, value=0.5, norm_sq=0.0, rate=1.0) == math.inf
    assert barrier_multiplier(inner=1.0, value=-9.0, norm_sq=2.0, rate=0.0) == 0.5


@pytest.mark.parametrize("field", ["inner", "value", "norm_sq", "rate"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_scalars_are_refused(field: str, bad: float) -> None:
    with pytest.raises(NumericalError, match=field):
        barrier_multiplier(**{"inner": 1.0, "value": 1.0, "norm_sq": 1.0, "rate": 1.0, field: bad})


def test_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="norm_sq"):
        barrier_multiplier(inner=1.0, value=1.0, norm_sq=-1.0, rate=1.0)
    with pytest.raises(ConfigError, match="rate"):
        barrier_multiplier(inner=1.0, value=1.0, norm_sq=1.0, rate=-0.1)
    with pytest.raises(NumericalError):
        barrier_multipliers(np.array([[math.nan]]), np.ones(1))
    with pytest.raises(NumericalError):
        barrier_multipliers(np.eye(1), np.array([math.inf]))
    with pytest.raises(ConfigError, match="shape"):
        barrier_multipliers(np.eye(2), np.ones(3))
    with pytest.raises(ConfigError, match="squared norm"):
        barrier_multipliers(-np.eye(2), np.ones(2))
    with pytest.raises(ConfigError, match="ridge"):
        barrier_multipliers(np.eye(2), np.ones(2), ridge=-1.0)


def test_event_names_are_the_ones_in_the_contract() -> None:
    names = ["inactive", "active", "capped", "infeasible", "infeasible_start", "restoration", "nonfinite"]
    assert [str(event) for event in Event] == names
