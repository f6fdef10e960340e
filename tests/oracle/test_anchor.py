"""The anchor against what it claims: quadratic growth is followed exactly, and no step ends above its ceiling."""

from __future__ import annotations

import copy
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.constraint.anchor import AGAIN, Anchor, Limit, radius
from holdfast.constraint.estimators import EmaEstimator, TableEstimator
from holdfast.constraint.event import Event
from holdfast.constraint.filter_input import FilterOptions
from holdfast.constraint.memory import RESTORATION_LIMIT, FilterMemory
from holdfast.constraint.problem import FilterProblem
from holdfast.core.errors import CheckpointError, ConfigError, InfeasibleError, NumericalError
from holdfast.training.steering import Steering
from holdfast.training.step import Measured

F64 = torch.float64
distances = st.lists(st.floats(1e-3, 10), min_size=1, max_size=30)


@given(distances, st.floats(0.01, 5), st.floats(0, 1), st.floats(0, 0.1), st.sampled_from(["ema", "table"]))
def test_a_value_that_grows_with_the_squared_distance_is_followed_exactly(path, growth, start, noise, name):
    """Above what rounding adds as soon as theta has moved at all."""
    estimator = EmaEstimator(0.9, start) if name == "ema" else TableEstimator(1, start, 0.9)
    for r in [0.0, 1e-7, *path]:
        phi = start + (noise if r > 0 else 0.0) + growth * r * r
        found = estimator.update(torch.zeros(1, dtype=torch.int64), torch.tensor([phi], dtype=F64), r * r)
        assert found == pytest.approx(phi, rel=1e-9, abs=1e-9)


@given(distances, st.floats(0.1, 0.99))
def test_a_gradient_that_grows_with_the_distance_is_followed_exactly(path, decay):
    anchor = Anchor(mean_distances=[0.0], measured_at=[0.0])
    memory, slope = FilterMemory(anchor=anchor), torch.tensor([2.0, -1.0], dtype=F64)
    for r in [0.0, *path]:
        memory.steps += 1
        memory.anchor.distance = r
        ((found,),) = memory.fold_gradients([[r * slope]], decay)
        assert found.tolist() == pytest.approx((r * slope).tolist(), rel=1e-9, abs=1e-12)


@given(
    st.floats(0.1, 3),
    st.lists(st.tuples(st.floats(-1, 0.5), st.floats(-1, 1), st.floats(0.01, 5)), min_size=1, max_size=4),
    st.floats(0.05, 1),
)
def test_the_radius_is_the_largest_at_which_no_prediction_is_above_its_ceiling(r, given_limits, rate):
    """Against a search over distances; from outside, the part `rate` of the way in r^2."""
    limits = [Limit(start, ceiling) for start, ceiling, _ in given_limits]
    values = [start + growth * r * r for start, _, growth in given_limits]

    def fits(distance: float) -> bool:
        pairs = zip(limits, values, strict=True)
        return all(a.floor + (v - a.floor) * (distance / r) ** 2 <= a.ceiling for a, v in pairs if a.ceiling > a.floor)

    found = radius(r, values, limits, rate)
    low, high = 0.0, 1e3
    if fits(high):
        assert found > high
        return
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    expected = low if low >= r else math.sqrt(r * r - rate * (r * r - low * low))
    assert found == pytest.approx(expected, rel=1e-6)


def trained(*, anchor: bool, rate: float, steps: int = 60) -> list[float]:
    """g after every step of Adam on a far target, under 0.5 p.H p <= 0.05 with 0.4 of it in reserve.

    H has eigenvalues from 0.1 to 10, and every step measures it on four random rows of that covariance.
    """
    draw = torch.Generator().manual_seed(0)
    scales = torch.logspace(-0.5, 0.5, 50, dtype=F64)
    p = torch.nn.Parameter(torch.zeros(50, dtype=F64))
    target = torch.randn(50, generator=draw, dtype=F64)
    optimizer = torch.optim.Adam([p], lr=rate)
    filt = hf.SafetyFilter(optimizer, rate=0.3, gradient_decay=0.9, anchor=anchor)
    mean, path = EmaEstimator(0.95), []
    for _ in range(steps):
        optimizer.zero_grad()
        ((p - target) ** 2).mean().backward()
        rows = torch.randn(4, 50, generator=draw, dtype=F64) * scales
        along = (rows @ p).detach()
        now, gradient = float((along**2).mean()) / 2, (along[:, None] * rows).mean(0)
        estimate = mean.absorb(now, None if filt.anchor is None else filt.anchor.distance**2)
        filt.arm([now - 0.03], [[gradient]], [estimate - 0.03], [Limit(-0.03, 0.0)])
        optimizer.step()
        path.append(float(((scales * p) ** 2).sum().detach()) / 2 - 0.05)
    return path


@pytest.mark.parametrize("rate", [0.002, 0.005])
def test_every_step_holds_whatever_the_rate(rate):
    """The first step is taken before anything is known of g, so rates are below that at which it alone violates."""
    assert max(trained(anchor=True, rate=rate)) <= 0.0
    assert max(trained(anchor=False, rate=rate)) > 0.01


def run(filt: hf.SafetyFilter, p: torch.nn.Parameter, rows: list[tuple[list[float], float]]) -> torch.Tensor:
    for h, value in rows:
        p.grad = torch.tensor([-1.0, 0.3], dtype=F64)
        filt.arm([value], [[torch.tensor(h, dtype=F64)]])
        filt.optimizer.step()
    return p.detach().clone()


def point(**options: object) -> tuple[hf.SafetyFilter, torch.nn.Parameter]:
    p = torch.nn.Parameter(torch.zeros(2, dtype=F64))
    return hf.SafetyFilter(torch.optim.SGD([p], lr=0.1), gradient_decay=0.5, **options), p


def test_two_steps_by_hand():
    """From theta_0 a step of 0.1 along each of two axes; g then is 4 times its limit, so r^2 goes 0.3 of the way."""
    filt, p = point(anchor=True, trust_region=1e-9, rate=0.3)
    p.grad = -torch.ones(2, dtype=F64)
    filt.arm([-1.0], [[torch.zeros(2, dtype=F64)]])
    filt.optimizer.step()
    assert p.tolist() == pytest.approx([0.1, 0.1])
    assert filt.last_event.pulled == 1.0
    p.grad = torch.zeros(2, dtype=F64)
    filt.arm([3.0], [[torch.ones(2, dtype=F64)]])  # (0 - -1) / (3 - -1) of the squared distance 0.02
    filt.optimizer.step()
    expected = math.sqrt(0.02 - 0.3 * (0.02 - 0.005))
    assert filt.anchor.distance == pytest.approx(expected)
    assert p.tolist() == pytest.approx([expected / math.sqrt(2)] * 2, rel=1e-6)
    assert filt.last_event.pulled == pytest.approx(expected / math.sqrt(0.02), rel=1e-6)


def test_a_resumed_filter_takes_the_same_steps():
    rows = [([math.sin(t), 1.0 + 0.3 * math.cos(t)], -0.05 + 0.02 * t) for t in range(8)]
    filt, p = point(anchor=True)
    other, q = point(anchor=True)
    run(filt, p, rows[:4])
    q.data.copy_(p.data)
    other.load_state_dict(copy.deepcopy(filt.state_dict()))
    assert torch.equal(run(filt, p, rows[4:]), run(other, q, rows[4:]))
    assert filt.last_event == other.last_event
    assert filt.last_event.pulled < 1.0


def test_a_slack_constraint_leaves_every_step_as_it_is():
    filt, p = point(anchor=True)
    run(filt, p, [([0.0, 1e-9], -0.5)] * 6)
    q = torch.nn.Parameter(torch.zeros(2, dtype=F64))
    plain = torch.optim.SGD([q], lr=0.1)
    for _ in range(6):
        q.grad = torch.tensor([-1.0, 0.3], dtype=F64)
        plain.step()
    assert torch.equal(p, q)


def test_a_discarded_step_is_not_pulled_and_the_next_one_measures():
    filt, p = point(anchor=True)
    before = run(filt, p, [([0.0, 0.1], -0.5)] * 3)
    filt.arm([5.0], [[torch.tensor([math.nan, 0.0], dtype=F64)]])
    p.grad = torch.ones(2, dtype=F64)
    filt.optimizer.step()
    assert torch.equal(p, before)
    assert filt.last_event.pulled == 1.0
    assert not filt.anchor.fresh(0)


def test_a_checkpoint_of_an_earlier_version_is_read():
    filt, p = point()
    run(filt, p, [([0.2, 1.0], -0.5)] * 2)
    state = {k: v for k, v in filt.state_dict().items() if k != "anchor"}
    other, q = point()
    other.load_state_dict(state)
    q.data.copy_(p.data)
    assert torch.equal(run(filt, p, [([0.2, 1.0], -0.1)]), run(other, q, [([0.2, 1.0], -0.1)]))


def test_a_checkpoint_without_relief_goes_on_with_a_step_that_measures_nothing():
    filt, p = point(anchor=True)
    run(filt, p, [([0.2, 1.0], -0.5)] * 2)
    state = {k: v for k, v in filt.state_dict().items() if k != "relief"}
    filt.load_state_dict(state)
    filt.arm([None], [None], [0.1], [Limit(-0.5, 0.2)])
    p.grad = torch.zeros(2, dtype=F64)
    filt.optimizer.step()
    assert filt.last_event.values == (0.1,)
    assert filt.state_dict()["relief"] == pytest.approx([0.3 * 0.1])


@pytest.mark.parametrize("options", [{"anchor": True}, {"verified": True}], ids=str)
def test_a_step_is_verified_where_it_ends_and_pulled_back_by_what_is_seen_there(options):
    """Values by the true g = 100 r^2 - 1 at the end of the step: the first has r^2 = 0.02, and so goes back to 0.01."""
    filt, p = point(**options, trust_region=1e-9, rate=0.3)
    looked: list[float] = []

    def verify() -> list[float]:
        looked.append(float(p.detach().square().sum()))
        return [100.0 * looked[-1] - 1.0]

    def step(direction: torch.Tensor) -> None:
        p.grad = direction
        filt.arm([-1.0], [[torch.zeros(2, dtype=F64)]], None, [Limit(-1.0, 0.0)], verify)
        filt.optimizer.step()

    step(-torch.ones(2, dtype=F64))
    assert looked == pytest.approx([0.02])
    assert p.tolist() == pytest.approx([math.sqrt(0.005)] * 2)
    assert filt.anchor.verified_at == filt.anchor.distance == pytest.approx(0.1)
    assert filt.last_event.pulled == pytest.approx(math.sqrt(0.5))
    step(-0.3 * torch.ones(2, dtype=F64))  # 0.03 more along each axis: less than half as far again
    assert len(looked) == 1
    assert filt.anchor.distance == pytest.approx(0.1 + 0.03 * math.sqrt(2))
    step(-0.3 * torch.ones(2, dtype=F64))
    assert len(looked) == 2
    assert filt.anchor.distance == pytest.approx(0.1)


@pytest.mark.parametrize(("options", "pulled"), [({"anchor": True}, True), ({"verified": True}, False)], ids=str)
def test_without_an_anchor_a_step_is_not_pulled_back_by_what_is_predicted(options, pulled):
    """A constraint that has no gradient and uses all of its room after one step, and then more than that."""
    filt, p = point(**options)
    run(filt, p, [([0.0, 0.0], -1.0)])
    p.grad = -torch.ones(2, dtype=F64)
    filt.arm([-0.1], [[torch.zeros(2, dtype=F64)]], None, [Limit(-1.0, 0.0)])
    filt.optimizer.step()
    assert (filt.last_event.pulled < 1.0) == pulled


def test_an_estimate_above_its_ceiling_is_verified_once_in_some_steps():
    """The estimate says 0.1 at every step, the look -0.5: nothing is pulled, every eighth step is looked at."""
    filt, p = point(verified=True, trust_region=1e-9)
    run(filt, p, [([0.0, 0.0], -1.0)])
    looked: list[int] = []
    for step in range(3 * AGAIN):
        p.grad = -1e-6 * torch.ones(2, dtype=F64)
        look = partial(lambda at: looked.append(at) or [-0.5], step)
        filt.arm([0.1], [[torch.zeros(2, dtype=F64)]], None, [Limit(-1.0, 0.0)], look)
        filt.optimizer.step()
        assert filt.last_event.pulled == 1.0
    assert looked == [0, AGAIN, 2 * AGAIN]
    assert filt.anchor.unverified == AGAIN - 1
    assert Anchor.from_state(filt.anchor.state_dict(filt._space()), filt._space(), pulls=False).unverified == AGAIN - 1


def test_a_look_forgets_what_corrections_took_before_it():
    """It is a measurement after them: a prediction from it is not reduced by them once more."""
    filt, p = point(verified=True)
    run(filt, p, [([0.2, 1.0], -0.5)] * 2)
    filt.anchor.unverified = AGAIN
    for look, relief in ((None, True), (lambda: [0.1], False)):
        filt.arm([None], [None], [0.3], [Limit(-0.5, 0.2)], look)
        p.grad = torch.zeros(2, dtype=F64)
        filt.optimizer.step()
        assert any(filt.state_dict()["relief"]) == relief


def test_a_checkpoint_does_not_change_whether_steps_are_pulled():
    filt, p = point(verified=True)
    run(filt, p, [([1.0, 0.0], -0.5)] * 2)
    filt.load_state_dict(filt.state_dict())
    assert not filt.anchor.pulls


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_verified_value_that_is_not_finite_ends_the_run(value):
    filt, p = point(anchor=True)
    p.grad = -torch.ones(2, dtype=F64)
    filt.arm([-1.0, -1.0], [[torch.zeros(2, dtype=F64)]] * 2, None, [Limit(-1.0, 0.0)] * 2, lambda: [-1.0, value])
    with pytest.raises(NumericalError, match="the value of constraint 1 is not finite") as caught:
        filt.optimizer.step()
    assert caught.value.remedy


def test_a_checkpoint_of_a_version_that_verified_nothing_is_read():
    filt, p = point(anchor=True)
    run(filt, p, [([1.0, 0.0], -0.5)] * 2)
    state: dict[str, Any] = filt.state_dict()
    now = {name: state["anchor"].pop(name) for name in ("distance", "mean_distances", "measured_at")}
    state["anchor"]["distances"] = [now["distance"], now["mean_distances"][0], now["measured_at"][0]]
    filt.load_state_dict(state)
    assert filt.anchor.verified_at == 0.0 < filt.anchor.distance
    assert [filt.anchor.mean_distances, filt.anchor.measured_at] == [now["mean_distances"], now["measured_at"]]


def test_what_is_verified_counts_as_batches_of_the_estimate():
    steering = followed(10.0, value_decay=0.9, verify=8)
    anchor = Anchor(distance=2.0)
    d = torch.tensor([0.0, 0.02, 0.1, 0.2], dtype=F64)
    terms = steering.terms(d)
    found = steering.verify(torch.arange(4), d, None, anchor, 3)
    assert found == pytest.approx(float(terms.mean()) - 0.05)
    estimator = steering.estimator
    assert (estimator.steps, estimator.mean, estimator.mean_square) == (3, pytest.approx(float(terms.mean())), 4.0)
    assert steering.verify(torch.arange(4), d * math.nan, None, anchor, 3) == math.inf
    assert estimator.steps == 3


OUT_OF_RANGE = [
    {"anchor": True, "space": "gradient"}, {"reserve": 1.0}, {"reserve": -0.1}, {"value_decay": 1.0}, {"every": 0},
    {"every": 2}, {"every": 2, "anchor": True, "estimator": "batch"}, {"draw": "often"},
    {"draw": "importance", "estimator": "table"}, {"verify": 8, "space": "gradient"}, {"verify": -1},
]  # fmt: skip


@pytest.mark.parametrize("options", OUT_OF_RANGE, ids=str)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError):
        FilterOptions(**options)


def test_no_constraint_has_a_radius_before_anything_moved():
    assert radius(0.0, [-0.05], [Limit(-0.05, 0.0)], 0.3) == math.inf
    assert radius(0.0, [-0.04], [Limit(-0.05, 0.0)], 0.3) == math.inf  # above its floor by noise alone
    assert np.isinf(radius(1.0, [0.2], [Limit(0.1, 0.0)], 0.3))  # violated at its floor


def followed(beta: float, majorizer: str = "ramp", **options: object) -> Steering:
    constraint = hf.ChanceConstraint(tau=0.1, alpha=0.05, beta=beta, majorizer=majorizer, unit="nll_token")
    safety = SimpleNamespace(constraint=constraint, constraint_set=[None] * 4)
    return Steering(safety, FilterOptions(anchor=True, **options))


def at(distance: float) -> Anchor:
    return Anchor(distance=distance)


def batch(*degradations: float) -> Measured:
    return Measured(torch.arange(len(degradations)), torch.tensor(degradations, dtype=F64), [])


def test_a_first_step_that_goes_too_far_is_pulled_back():
    """What it leaves is no rounding: the radius is that of the way from the start, not none."""
    steering = followed(10.0, reserve=0.4)
    steering.estimate(batch(0.0, 0.0), at(0.0))
    _, value = steering.estimate(batch(0.02, 0.02), at(2.0))  # phi = 0.2, four times alpha
    limit = steering.limit_of_steps()
    assert (limit.floor, limit.ceiling) == pytest.approx((-0.03, 0.01))
    assert radius(2.0, [value], [limit], 1.0) == pytest.approx(2.0 * math.sqrt(0.04 / 0.2))


def test_what_a_first_step_adds_below_the_ceiling_is_taken_for_rounding():
    """In the same step: value and limit have one floor."""
    steering = followed(10.0, reserve=0.4)
    _, value = steering.estimate(batch(0.001, 0.001), at(2.0))
    limit = steering.limit_of_steps()
    assert limit.floor == pytest.approx(0.01 - 0.03)
    assert radius(2.0, [value], [limit], 1.0) == math.inf


@pytest.mark.parametrize("estimator", ["batch", "ema", "table"])
def test_the_floor_of_every_estimator_is_the_start_where_nothing_degraded(estimator):
    """phi(-tau) is not zero with the exponential majorizer; of a lower floor it would be growth."""
    steering = followed(40.0, "exponential", estimator=estimator)
    _, value = steering.estimate(batch(0.0, 0.0), at(2.0))
    assert steering.limit_of_steps().floor == pytest.approx(math.exp(-4.0) - 0.05)
    assert radius(2.0, [value], [steering.limit_of_steps()], 1.0) == math.inf


@given(distances, st.floats(-1, 0))
def test_values_that_fall_are_not_predicted_to_fall_further(path, fall):
    """A likelihood may improve. The average is then what it is without an anchor."""
    following, plain = EmaEstimator(0.9), EmaEstimator(0.9)
    for r in path:
        assert following.absorb(fall * r, r * r) == plain.absorb(fall * r)


def test_nothing_is_predicted_at_theta_0():
    """Where the first step was discarded there is no gradient to go by, and at learning rate 0 no distance."""
    filt, p = point(anchor=True)
    filt.arm([math.nan], [[torch.ones(2, dtype=F64)]])
    p.grad = torch.ones(2, dtype=F64)
    filt.optimizer.step()
    assert not filt.anchor.fresh(0)
    filt.optimizer.param_groups[0]["lr"] = 0.0
    run(filt, p, [([0.0, 0.1], -0.5)])
    assert not filt.anchor.fresh(0)
    filt.optimizer.param_groups[0]["lr"] = 0.1
    run(filt, p, [([0.0, 0.1], -0.5)] * 2)
    filt.optimizer.param_groups[0]["lr"] = 0.0
    run(filt, p, [([0.0, 0.1], -0.5)])
    assert filt.anchor.fresh(0)


def test_steps_that_measure_nothing_count_as_steps():
    """So that four discarded steps end a run where they are among a hundred, not among a hundred measured ones."""
    filt, p = point(anchor=True)
    run(filt, p, [([0.0, 0.1], -0.5)] * 2)
    for _ in range(5):
        filt.arm([math.nan], [[torch.ones(2, dtype=F64)]])
        filt.optimizer.step()
        for _ in range(40):
            p.grad = torch.zeros(2, dtype=F64)
            filt.arm([None], [None], [-0.5], [Limit(-1.0, 0.0)])
            filt.optimizer.step()
    assert len(filt.state_dict()["nonfinite_steps"]) == 3


def test_steps_in_between_undo_a_violation_once():
    """v = 0.5 - 0.15 - ...: what the steps since the measurement have taken is not asked for again, resumed or not."""
    p, h, far = torch.nn.Parameter(torch.zeros(2, dtype=F64)), [torch.tensor([1.0, 0.0], dtype=F64)], [Limit(-9.0, 1e6)]
    optimizer = torch.optim.SGD([p], lr=0.1)
    filt = hf.SafetyFilter(optimizer, rate=0.3, anchor=True, gradient_decay=0.5)
    left = 0.5
    for step in range(6):
        if step == 3:
            state = filt.state_dict()
            filt.detach()
            filt = hf.SafetyFilter(optimizer, rate=0.3, anchor=True, gradient_decay=0.5)
            filt.load_state_dict(state)
        filt.anchor.mean_distances = [0.5 * filt.anchor.distance]  # of the average of 0 and h: it does not grow here
        filt.arm([0.5], [h], None, far) if step == 0 else filt.arm([None], [None], [0.5], far)
        p.grad, before = torch.tensor([0.0, 10.0], dtype=F64), p[0].item()
        optimizer.step()
        assert p[0].item() - before == pytest.approx(-0.3 * left)
        assert filt.last_event.values[0] == pytest.approx(left)
        left *= 0.7


def test_a_step_within_its_barrier_takes_nothing():
    """Where the nominal step raises a constraint that has room, cancelling the rest of it is no relief."""
    problem = FilterProblem(np.array([0.5, 0.2]), np.eye(2), np.eye(2), np.array([-0.1, 0.3]), 1.0, 1.0)
    mu = problem.multipliers()
    assert mu == pytest.approx([0.4, 0.5])
    assert problem.taken(mu) == pytest.approx([0.0, 0.3])


def test_predicted_headway_does_not_hide_a_violation():
    """v is 1 whenever it is measured: what the steps in between are predicted to take does not end the restoration.

    The radius is 0.3, so v goes 1, 0.7, 0.4, 0.1, and by then the whole correction fits.
    """
    p, h, limits = torch.nn.Parameter(torch.zeros(2, dtype=F64)), [torch.tensor([1.0, 0.0], dtype=F64)], [Limit(2, 0)]
    filt = hf.SafetyFilter(torch.optim.SGD([p], lr=0.1), rate=0.9, trust_region=1.0, anchor=True, gradient_decay=0.5)
    names = []

    def train() -> None:
        for step in range(3 * RESTORATION_LIMIT):
            filt.anchor.mean_distances = [(1 - 0.5 ** ((step + 5) // 6)) * filt.anchor.distance]  # h stays what it is
            filt.arm([1.0], [h], None, limits) if step % 6 == 0 else filt.arm([None], [None], [1.0], limits)
            p.grad = torch.tensor([0.0, 3.0], dtype=F64)
            filt.optimizer.step()
            names.append(filt.last_event.name)

    with pytest.raises(InfeasibleError, match=rf"= 1\) and {RESTORATION_LIMIT} restoration steps"):
        train()
    assert names[:12] == ([Event.RESTORATION] * 3 + [Event.ACTIVE] * 3) * 2


@pytest.mark.parametrize("anchor", [False, True])
def test_a_state_of_the_other_kind_of_filter_is_refused(anchor):
    """A state without theta_0 would switch the anchor off."""
    wanted = "an anchor" if anchor else "neither"
    with pytest.raises(CheckpointError, match=f"this filter has {wanted}"):
        point(anchor=anchor)[0].load_state_dict(point(anchor=not anchor)[0].state_dict())
    with pytest.raises(CheckpointError, match=f"is of one with verified steps alone, this filter has {wanted}"):
        point(anchor=anchor)[0].load_state_dict(point(verified=True)[0].state_dict())


def test_using_the_reserve_is_no_violation():
    """Up to its ceiling a constraint may stay for as long as it likes; above it, restoring must get somewhere."""
    memory = FilterMemory(anchor=Anchor())
    for _ in range(3 * RESTORATION_LIMIT):
        memory.watch_restoration(Event.RESTORATION, [0.009, -0.1], [Limit(-0.1, 0.01), Limit(-0.1, 0.0)])
    above = [0.011, -0.1], [Limit(-0.1, 0.01), Limit(-0.1, 0.0)]
    for _ in range(RESTORATION_LIMIT - 1):
        memory.watch_restoration(Event.RESTORATION, *above)
    with pytest.raises(InfeasibleError):
        memory.watch_restoration(Event.RESTORATION, *above)
