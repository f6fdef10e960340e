"""The filter against a quadratic-programme solver, in float64.

1,000 random instances, K = 1 to 4, both spaces, both metrics.

update:    min 1/2 (s - s_nom)^T M^-1 (s - s_nom)   s.t.  H s <= -gamma v
gradient:  min 1/2 |d + grad f|^2                   s.t.  H d <= -(gamma / lr) v
"""

from __future__ import annotations

import copy

import clarabel
import numpy as np
import pytest
import torch
from scipy import sparse

from holdfast.constraint.event import Event
from holdfast.constraint.filter import SafetyFilter
from holdfast.constraint.memory import SAFETY_BETA2
from holdfast.constraint.metric import RELATIVE_FLOOR

SHAPES = ((3, 4), (5,))
SIZE = 17
INSTANCES = 1000
SETTINGS = [("update", "identity"), ("update", "adam"), ("gradient", "identity")]


def solve(weights: np.ndarray, nominal: np.ndarray, rows: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """`min 1/2 sum_i weights_i (x_i - nominal_i)^2  s.t.  rows x <= bounds`, by an interior-point solver.

    Solved for `y = sqrt(weights) x`, so that the solver sees a well-scaled problem.
    """
    root = np.sqrt(weights)
    scaled = rows / root
    norms = np.linalg.norm(scaled, axis=1)
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-11
    settings.max_iter = 500
    size = np.abs(root * nominal).max()
    found = clarabel.DefaultSolver(
        sparse.identity(len(nominal), format="csc"), -(root * nominal) / size,
        sparse.csc_matrix(scaled / norms[:, None]), bounds / norms / size,
        [clarabel.NonnegativeConeT(len(bounds))], settings,
    ).solve()  # fmt: skip
    assert found.status == clarabel.SolverStatus.Solved, found.status
    return np.asarray(found.x) * size / root


def flat(tensors) -> np.ndarray:
    return torch.cat([t.detach().reshape(-1) for t in tensors]).numpy().copy()


def problem(seed: int, space: str):
    """Parameters with a warmed-up optimizer, a task gradient, K constraint gradients and values."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    params = [torch.nn.Parameter(normal(*shape)) for shape in SHAPES]
    optimizer = (
        torch.optim.SGD(params, lr=0.03)
        if space == "gradient"
        else torch.optim.AdamW(params, lr=0.03, weight_decay=0.1)
    )
    for _ in range(3):
        for p in params:
            p.grad = normal(*p.shape)
        optimizer.step()
    count = 1 + seed % 4
    gradients = [[normal(*shape) * 10 ** float(normal(1)) for shape in SHAPES] for _ in range(count)]
    values = (0.3 * normal(count)).tolist()
    for p in params:
        p.grad = normal(*p.shape)
    return params, optimizer, gradients, values


def adam_weights(params, optimizer, gradients) -> np.ndarray:
    """M^-1 of the Adam metric, written out from its definition."""
    parts = []
    for i, p in enumerate(params):
        state = optimizer.state[p]
        v_task = state["exp_avg_sq"] / (1 - 0.999 ** float(state["step"]))
        v_safe = torch.stack([h[i] for h in gradients]).square().amax(0)  # one step: debiased moment = last square
        parts.append(torch.maximum(v_task, v_safe).sqrt().reshape(-1))
    root = torch.cat(parts).numpy()
    return root + 1e-8 + RELATIVE_FLOOR * root.mean()


@pytest.mark.parametrize(("space", "metric"), SETTINGS)
def test_filter_solves_the_quadratic_programme(space, metric):
    active = 0
    for seed in range(SETTINGS.index((space, metric)), INSTANCES, len(SETTINGS)):
        params, optimizer, gradients, values = problem(seed, space)
        rows = np.stack([flat(h) for h in gradients])
        before, task = flat(params), flat([p.grad for p in params])
        twin_params, twin = copy.deepcopy((params, optimizer))
        for p, q in zip(params, twin_params, strict=True):
            q.grad = p.grad.clone()
        rate = 0.1 + 0.9 * (seed % 10) / 10
        filt = SafetyFilter(optimizer, rate=rate, space=space, metric=metric, trust_region=1e12)
        filt.arm(values, gradients)
        if space == "gradient":
            expected = solve(np.ones(SIZE), -task, rows, -np.asarray(values) * rate / 0.03)
            found = -flat([p.grad for p in params])
        optimizer.step()
        if space == "update":
            twin.step()
            nominal = flat(twin_params) - before
            weights = np.ones(SIZE) if metric == "identity" else adam_weights(params, optimizer, gradients)
            expected = solve(weights, nominal, rows, -np.asarray(values) * rate)
            found = flat(params) - before
        assert np.linalg.norm(found - expected) <= 1e-6 * np.linalg.norm(expected), (seed, filt.last_event)
        active += filt.last_event.name is Event.ACTIVE
    assert active > INSTANCES / len(SETTINGS) / 3  # the comparison is not about slack filters


@pytest.mark.parametrize("metric", ["identity", "adam"])
def test_trust_region_scales_the_solution_down(metric):
    """Capped: the correction is the programme's, shortened to c norm(s_nom); nothing else changes."""
    capped = 0
    for seed in range(60):
        params, optimizer, gradients, values = problem(seed, "update")
        values = [-abs(v) - 0.01 for v in values]  # feasible: a capped step is not a restoration
        before = flat(params)
        free_params, free = copy.deepcopy((params, optimizer))
        plain_params, plain = copy.deepcopy((params, optimizer))
        for p, q, r in zip(params, free_params, plain_params, strict=True):
            q.grad, r.grad = p.grad.clone(), p.grad.clone()
        for optim, radius in ((optimizer, 0.05), (free, 1e12)):
            filt = SafetyFilter(optim, rate=0.05, metric=metric, trust_region=radius)
            filt.arm(values, [[h.clone() for h in vector] for vector in gradients])
            optim.step()
            if optim is optimizer:
                event = filt.last_event
        plain.step()
        nominal = flat(plain_params) - before
        full, applied = flat(free_params) - flat(plain_params), flat(params) - flat(plain_params)
        limit = 0.05 * np.linalg.norm(nominal)
        if np.linalg.norm(full) <= limit:
            assert np.allclose(applied, full, rtol=1e-9, atol=1e-14)
            continue
        capped += 1
        assert event.name is Event.CAPPED
        assert np.allclose(applied, full * limit / np.linalg.norm(full), rtol=1e-9, atol=1e-14)
    assert capped > 20
    assert SAFETY_BETA2 == 0.999
