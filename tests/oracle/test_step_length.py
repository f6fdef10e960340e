"""The length of a step, against its definition computed elsewhere and against the filter's own corrected steps."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.constraint.filter_settings import FilterOptions
from holdfast.constraint.step_length import KEPT, LEAST, GradientError, step_share
from holdfast.core.errors import ConfigError

VALUES = st.floats(-1.0, 1.0, allow_nan=False)
ERRORS = st.just(0.0) | st.floats(1e-3, 10.0)


@given(st.lists(st.tuples(VALUES, ERRORS), min_size=1, max_size=4), st.floats(0.01, 10), st.floats(0.1, 5))
def test_the_share_is_the_longest_step_whose_errors_fit_into_the_allowed_slack(pairs, norm, caution):
    values, errors = zip(*pairs, strict=True)
    share = step_share(values, errors, norm, rate=0.6, caution=caution)

    def fits(f: float) -> bool:
        return all(caution * e * f * norm <= 0.6 * max(0.0, -v) * (1 + 1e-9) for v, e in pairs)

    assert LEAST <= share <= 1.0
    assert fits(share) or share == LEAST
    assert share == 1.0 or not fits(share * 1.001)


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.1, 3)), min_size=1, max_size=40))
def test_the_error_is_the_weighted_mean_square_over_steps(steps):
    error = GradientError()
    for unforeseen, norm in steps:
        (found,) = error.update([unforeseen], norm)
    weights = np.array([KEPT ** (len(steps) - 1 - t) for t in range(len(steps))])
    squares = np.array([(u / n) ** 2 for u, n in steps])
    assert found == pytest.approx(math.sqrt(weights @ squares / weights.sum()), rel=1e-9, abs=1e-12)


def test_a_step_of_no_length_measures_no_error():
    error = GradientError()
    assert error.update([1.0, 2.0], 0.0) == [0.0, 0.0]
    assert error.steps == 0


def curved(**options: object) -> tuple[torch.nn.Parameter, torch.optim.Optimizer, hf.SafetyFilter]:
    """A point that a task pulls along the first axis, its optimizer, and a filter on it."""
    p = torch.nn.Parameter(torch.tensor([0.0, 0.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([p], lr=0.1)
    settings = {"rate": 0.5, "metric": "identity", "trust_region": 1e6, "gradient_decay": 0.5, **options}
    return p, optimizer, hf.SafetyFilter(optimizer, **settings)


def armed_step(p, optimizer, filt, h, value):
    p.grad = torch.tensor([-1.0, 0.0], dtype=torch.float64)
    before = p.detach().clone()
    filt.arm([value], [[torch.tensor(h, dtype=torch.float64)]])
    optimizer.step()
    return p.detach() - before


def test_the_filter_takes_the_share_and_then_corrects():
    """Two steps by hand: the second batch's gradient differs from the average, by which the step is shortened."""
    p, optimizer, filt = curved(caution=2.0)
    first = armed_step(p, optimizer, filt, [0.5, 0.0], -10.0)
    assert torch.equal(first, torch.tensor([0.1, 0.0], dtype=torch.float64))
    assert filt.last_event.step_length == 1.0  # batch and average are the same

    value, h1, h2 = -0.02, np.array([0.5, 0.0]), np.array([2.0, 1.0])
    second = armed_step(p, optimizer, filt, h2.tolist(), value)
    average = (0.5 * h1 + h2) / 1.5
    nominal = np.array([0.1, 0.0])
    unforeseen = float((h2 - average) @ nominal) / 0.1
    error = math.sqrt((KEPT * 0.0 + unforeseen**2) / (1 + KEPT))
    share = max(LEAST, min(1.0, 0.5 * 0.02 / (2.0 * error * 0.1)))
    assert LEAST < share < 1.0
    assert filt.last_event.step_length == pytest.approx(share, rel=1e-12)
    short = share * nominal
    mu = max(0.0, average @ short + 0.5 * value) / (average @ average)
    assert mu > 0.0
    assert second.numpy() == pytest.approx(short - mu * average, rel=1e-12)
    assert filt.last_event.residual == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("caution", [0.0, 3.0])
def test_a_constraint_that_nothing_moves_leaves_every_step_as_it_is(caution):
    p, optimizer, filt = curved(caution=caution)
    plain = torch.nn.Parameter(p.detach().clone())
    reference = torch.optim.SGD([plain], lr=0.1)
    for _ in range(5):
        armed_step(p, optimizer, filt, [0.0, 0.0], -0.5)
        assert filt.last_event.step_length == 1.0
        plain.grad = torch.tensor([-1.0, 0.0], dtype=torch.float64)
        reference.step()
        assert torch.equal(p, plain)


def test_without_caution_no_step_is_shortened():
    p, optimizer, filt = curved()
    for t in range(5):
        armed_step(p, optimizer, filt, [float(t % 2), 1.0], -0.01)
        assert filt.last_event.step_length == 1.0


def test_a_resumed_filter_takes_the_same_steps():
    rows = [([math.sin(t), 1.0 + 0.3 * math.cos(t)], -0.05 + 0.005 * t) for t in range(8)]
    p, optimizer, filt = curved(caution=1.5)
    for h, value in rows[:4]:
        armed_step(p, optimizer, filt, h, value)
    q, other, resumed = curved(caution=1.5)
    q.data.copy_(p.data)
    resumed.load_state_dict(copy.deepcopy(filt.state_dict()))
    for h, value in rows[4:]:
        assert torch.equal(armed_step(p, optimizer, filt, h, value), armed_step(q, other, resumed, h, value))
        assert filt.last_event == resumed.last_event


OUT_OF_RANGE = [
    {"caution": -1.0}, {"caution": math.inf}, {"caution": 1.0, "estimator": "batch"},
    {"caution": 1.0, "space": "gradient"}, {"reserve": 1.0}, {"reserve": -0.1}, {"value_decay": 1.0},
]  # fmt: skip


@pytest.mark.parametrize("options", OUT_OF_RANGE, ids=str)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError):
        FilterOptions(**options)
