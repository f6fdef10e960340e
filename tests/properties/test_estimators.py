"""Estimators of mean phi: unbiased, quiet enough for small batches, and exactly resumable."""

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from holdfast.constraint.estimators import (
    BatchEstimator,
    EmaEstimator,
    Estimator,
    TableEstimator,
    TailThreshold,
    make_estimator,
)
from holdfast.core.errors import CheckpointError, ConfigError, DataError, NumericalError
from holdfast.data.streams import StepStream

SIZE, BATCH = 200, 10


def correlated(seed: int, correlation: float) -> tuple[Tensor, Tensor]:
    """A table of last-seen values and today's values, correlated as asked."""
    g = torch.Generator().manual_seed(seed)
    old = torch.rand(SIZE, generator=g, dtype=torch.float64)
    noise = torch.rand(SIZE, generator=g, dtype=torch.float64)
    return old, correlation * old + math.sqrt(1 - correlation**2) * noise


def batches(seed: int) -> Callable[[], Tensor]:
    g = torch.Generator().manual_seed(seed)
    return lambda: torch.randint(SIZE, (BATCH,), generator=g)


def test_batch_and_ema_are_unbiased() -> None:
    _, phi = correlated(0, 0.0)
    draw = batches(1)
    raw, averaged = [], []
    for _ in range(3000):
        raw.append(BatchEstimator().update(index := draw(), phi[index]))
        ema = EmaEstimator(0.9)
        for _ in range(3):
            last = ema.update(index := draw(), phi[index])
        averaged.append(last)
    for values in (raw, averaged):
        error = np.std(values) / math.sqrt(len(values))
        assert abs(np.mean(values) - phi.mean().item()) < 4 * error
    assert np.std(averaged) < 0.7 * np.std(raw)


@pytest.mark.parametrize("correlation", [0.0, 0.95])
def test_table_is_unbiased_with_a_warm_table_and_coefficient(correlation: float) -> None:
    old, phi = correlated(2, correlation)
    draw = batches(3)
    warm = TableEstimator(SIZE, 0.0, decay=0.0)
    # Population moments, so that the coefficient is the regression's.
    moments = torch.stack([phi.mean(), old.mean(), (phi * old).mean(), old.square().mean()])
    state = {"table": old, "moments": moments, "mean": 0.0, "steps": 0}
    values, raw = [], []
    for _ in range(4000):
        warm.load_state_dict(state)
        values.append(warm.update(index := draw(), phi[index]))
        raw.append(phi[index].mean().item())
    error = np.std(values) / math.sqrt(len(values))
    assert abs(np.mean(values) - phi.mean().item()) < 4 * error
    # Regression leaves the share 1 - corr^2 of the variance.
    actual = np.corrcoef(old.numpy(), phi.numpy())[0, 1]
    assert np.var(values) / np.var(raw) == pytest.approx(1 - max(actual, 0.0) ** 2, rel=0.1)


def test_the_table_is_unbiased_under_drift_without_replacement() -> None:
    """Rows that drift at speeds of their own, drawn in passes: the batch holds the rows seen longest ago."""
    errors, raw = [], []
    for seed in range(60):
        g = torch.Generator().manual_seed(seed)
        start, speed = (torch.rand(SIZE, generator=g, dtype=torch.float64) for _ in range(2))
        stream, table = StepStream(SIZE, BATCH, seed, "drift"), TableEstimator(SIZE, 0.0, decay=0.0)
        table.update(torch.arange(SIZE), start)  # every row is seen at the start
        for step in range(3 * SIZE // BATCH - 2):
            phi = start + 0.05 * (step + 1) * speed
            found = table.update(index := torch.tensor(stream.indices(step)), phi[index])
            if step > SIZE // BATCH:
                errors.append(found - phi.mean().item())
                raw.append(phi[index].mean().item() - phi.mean().item())
    assert np.std(errors) < 0.8 * np.std(raw)
    assert abs(np.mean(errors)) < 4 * np.std(errors) / math.sqrt(len(errors))
    assert abs(np.mean(errors)) < 0.002 * 0.05 * SIZE / BATCH  # of the drift of one pass


def test_granularity_two_percent_violators() -> None:
    """A batch of 10 sees a violator in 1 - 0.98^10 = 18% of the steps although 2% is below alpha = 5%."""
    phi = torch.zeros(SIZE, dtype=torch.float64)
    phi[:4] = 1.0
    draw = batches(4)
    estimators = {"batch": BatchEstimator(), "ema": EmaEstimator(), "table": TableEstimator(SIZE, 0.0)}
    active = dict.fromkeys(estimators, 0)
    steps, burn_in = 8000, 200  # by then the table has seen nearly every row
    for step in range(burn_in + steps):
        index = draw()
        for name, estimator in estimators.items():
            active[name] += (estimator.update(index, phi[index]) > 0.05) and step >= burn_in  # type: ignore[attr-defined]
    expected = 1 - 0.98**10
    assert abs(active["batch"] / steps - expected) < 4 * math.sqrt(expected * (1 - expected) / steps)
    assert active["ema"] / steps < 0.02
    assert active["table"] / steps < 0.001


def test_ema_is_the_normalised_weighted_average() -> None:
    values = np.random.default_rng(0).normal(size=25)
    ema = EmaEstimator(0.8)
    for k, value in enumerate(values, start=1):
        estimate = ema.update(torch.zeros(1, dtype=torch.int64), torch.tensor([value], dtype=torch.float64))
        assert estimate == pytest.approx(np.average(values[:k], weights=0.8 ** np.arange(k)[::-1]), rel=1e-12)
        assert k > 1 or estimate == value


def test_table_follows_its_formula_on_hand_computed_numbers() -> None:
    table = TableEstimator(4, start_phi=0.5, decay=0.0)
    f64 = torch.float64
    assert table.update(torch.tensor([0, 1]), torch.tensor([1.0, 0.0], dtype=f64)) == 0.5
    assert table.coefficient() == 0.0  # all last-seen values were equal
    assert table.table.tolist() == [1.0, 0.0, 0.5, 0.5]
    # phi = (1, 0.5) against phi~ = (1, 0): c = Cov / Var = 0.125 / 0.25, used from the next batch on.
    assert table.update(torch.tensor([0, 1]), torch.tensor([1.0, 0.5], dtype=f64)) == 0.75
    assert table.coefficient() == 0.5
    assert table.table.tolist() == [1.0, 0.5, 0.5, 0.5]
    # mean_B phi = 1, mean_table = 0.625, mean_B phi~ = 0.75.
    assert table.update(torch.tensor([0, 2]), torch.tensor([1.0, 1.0], dtype=f64)) == 1 + 0.5 * (0.625 - 0.75)


def test_the_coefficient_is_clipped_to_the_unit_interval() -> None:
    both = torch.tensor([0, 1])
    for new, expected in (([3.0, 0.0], 1.0), ([0.0, 3.0], 0.0)):
        table = TableEstimator(2, start_phi=0.5, decay=0.0)
        table.update(both, torch.tensor([1.0, 0.0], dtype=torch.float64))
        table.update(both, torch.tensor(new, dtype=torch.float64))  # the regression's slope is 3 or -3
        assert table.coefficient() == expected


def test_a_row_twice_in_a_batch_is_remembered_as_its_mean() -> None:
    table = TableEstimator(3, start_phi=0.0)
    estimate = table.update(torch.tensor([1, 2, 1]), torch.tensor([1.0, 5.0, 3.0], dtype=torch.float64))
    assert estimate == 3.0
    assert table.table.tolist() == [0.0, 2.0, 5.0]


def test_the_table_is_exact_where_phi_does_not_move() -> None:
    _, phi = correlated(5, 0.0)
    table, draw = TableEstimator(SIZE, 0.0, decay=0.5), batches(6)
    table.update(torch.arange(SIZE), phi)
    for _ in range(60):
        estimate = table.update(index := draw(), phi[index])
    assert table.coefficient() == pytest.approx(1.0, abs=1e-9)
    assert estimate == pytest.approx(phi.mean().item(), rel=1e-9)


@pytest.mark.parametrize("name", ["batch", "ema", "table"])
def test_resume_is_exact(name: str) -> None:
    _, phi = correlated(7, 0.0)
    draw = batches(8)
    indices = [draw() for _ in range(40)]

    def run(estimator: Estimator, part: list[Tensor]) -> list[float]:
        return [estimator.update(index, phi[index] * (k + 1)) for k, index in enumerate(part)]

    whole = make_estimator(name, size=SIZE, start_phi=0.1, decay=0.9)
    run(whole, indices[:20])
    state = whole.state_dict()
    stored = {k: v if isinstance(v, Tensor) else json.loads(json.dumps(v)) for k, v in state.items()}
    expected = run(whole, indices[20:])
    resumed = make_estimator(name, size=SIZE, start_phi=0.1, decay=0.9)
    resumed.load_state_dict(stored)
    assert run(resumed, indices[20:]) == expected


def test_nonfinite_values_are_refused_before_they_enter_the_state() -> None:
    for name in ("batch", "ema", "table"):
        estimator = make_estimator(name, size=3, start_phi=0.0, decay=0.9)
        estimator.update(torch.tensor([0, 1]), torch.tensor([1.0, 2.0], dtype=torch.float64))
        before = {k: v.clone() if isinstance(v, Tensor) else v for k, v in estimator.state_dict().items()}
        with pytest.raises(NumericalError, match=r"1 of 2 .*\[1\]"):
            estimator.update(torch.tensor([0, 1]), torch.tensor([1.0, math.inf], dtype=torch.float64))
        after = estimator.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(torch.as_tensor(before[k]), torch.as_tensor(after[k])) for k in before)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="table"):
        make_estimator("tabel", size=1, start_phi=0.0, decay=0.9)
    for decay in (1.0, -0.1, math.nan):
        with pytest.raises(ConfigError, match="decay"):
            make_estimator("ema", size=1, start_phi=0.0, decay=decay)
    with pytest.raises(DataError):
        make_estimator("table", size=0, start_phi=0.0, decay=0.9)
    with pytest.raises(DataError):
        BatchEstimator().update(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64))
    with pytest.raises(CheckpointError, match="4"):
        TableEstimator(4, 0.0).load_state_dict(TableEstimator(3, 0.0).state_dict())
    with pytest.raises(CheckpointError, match="4"):
        TailThreshold(4, tau=0.1, alpha=0.1).load_state_dict(TailThreshold(3, tau=0.1, alpha=0.1).state_dict())


@given(
    D=st.lists(st.floats(-1.0, 2.0), min_size=1, max_size=40),
    alpha=st.floats(0.01, 0.9),
    tau=st.floats(0.05, 2.0),
    decay=st.sampled_from([0.0, 0.5, 0.9]),
)
def test_moving_t_never_increases_the_constraint(D: list[float], alpha: float, tau: float, decay: float) -> None:
    x = torch.tensor(D, dtype=torch.float64)
    tail = TailThreshold(len(D), tau=tau, alpha=alpha, decay=decay)

    def nats(t: float) -> float:
        return t + (x - t).clamp(min=0).mean().item() / alpha

    before = nats(0.0)
    for _ in range(4):
        after = nats(tail.update(torch.arange(len(D)), x))
        assert after <= before + 1e-12
        before = after
    if decay == 0.0:
        inside = [t for t in [*D, 0.0, 0.9 * tau] if 0 <= t <= 0.9 * tau]
        assert before == pytest.approx(min(map(nats, inside)), rel=1e-12, abs=1e-12)


def test_tail_threshold_keeps_the_last_seen_and_moves_slowly() -> None:
    tail = TailThreshold(20, tau=1.0, alpha=0.1)
    high = torch.full((3,), 0.8, dtype=torch.float64)
    assert tail.update(torch.tensor([0, 1]), high[:2]) == 0.0  # two of twenty are the allowed share
    assert tail.update(torch.tensor([2, 3, 2]), high) == pytest.approx(0.08)
    assert tail.update(torch.tensor([4]), torch.tensor([9.0], dtype=torch.float64)) == pytest.approx(0.152)
    state = tail.state_dict()
    resumed = TailThreshold(20, tau=1.0, alpha=0.1)
    resumed.load_state_dict(state)
    assert resumed.update(torch.tensor([5]), high[:1]) == tail.update(torch.tensor([5]), high[:1])
    assert state["t"] == pytest.approx(0.152)


def test_tail_threshold_is_clipped() -> None:
    tail = TailThreshold(2, tau=0.5, alpha=0.1, decay=0.0)
    both = torch.tensor([0, 1])
    assert tail.update(both, torch.tensor([9.0, 9.0], dtype=torch.float64)) == pytest.approx(0.45)
    assert tail.update(both, torch.tensor([-9.0, -9.0], dtype=torch.float64)) == 0.0
