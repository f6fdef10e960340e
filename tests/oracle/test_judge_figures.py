"""The figures of a judge against their definitions written out: pairs counted, thresholds walked, bins filled."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from holdfast_lab.evaluation import judge_figures as figures

# Few distinct values, so that ties are common.
LABELLED = st.lists(st.tuples(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0]), st.booleans()), min_size=1)


def split(rows) -> tuple[list[float], list[bool]]:
    return [score for score, _ in rows], [label for _, label in rows]


@given(LABELLED)
def test_auroc_is_the_share_of_pairs_in_order(rows):
    ups, downs = [s for s, y in rows if y], [s for s, y in rows if not y]
    found = figures.auroc(*split(rows))
    if not ups or not downs:
        assert found is None
    else:
        wins = sum(1.0 if u > d else 0.5 if u == d else 0.0 for u in ups for d in downs)
        assert found == pytest.approx(wins / (len(ups) * len(downs)), abs=1e-12)


@given(LABELLED)
def test_auroc_equals_the_rank_test_of_scipy(rows):
    ups, downs = [s for s, y in rows if y], [s for s, y in rows if not y]
    if ups and downs:
        statistic = stats.mannwhitneyu(ups, downs).statistic
        assert figures.auroc(*split(rows)) == pytest.approx(statistic / (len(ups) * len(downs)), abs=1e-12)


def test_auroc_extremes():
    assert figures.auroc([1, 2, 3, 4], [False, False, True, True]) == 1
    assert figures.auroc([1, 2, 3, 4], [True, True, False, False]) == 0
    assert figures.auroc([5, 5, 5], [True, False, True]) == 0.5


def test_the_interval_is_delongs_by_literal_placements():
    draw = np.random.default_rng(3)
    scores, labels = np.round(draw.normal(size=60), 1), draw.random(60) < 0.4
    scores[labels] += 0.5
    ups, downs = scores[labels], scores[~labels]

    def beats(u: float, d: float) -> float:
        return 1.0 if u > d else 0.5 if u == d else 0.0

    v = [np.mean([beats(u, d) for d in downs]) for u in ups]
    w = [np.mean([beats(u, d) for u in ups]) for d in downs]
    half = stats.norm.ppf(0.975) * math.sqrt(np.var(v, ddof=1) / len(ups) + np.var(w, ddof=1) / len(downs))
    low, high = figures.auroc_interval(scores, labels)  # type: ignore[misc]
    assert low == pytest.approx(np.mean(v) - half, abs=1e-12)
    assert high == pytest.approx(np.mean(v) + half, abs=1e-12)
    assert figures.auroc_interval([1, 2, 3], [True, False, False]) is None
    assert figures.auroc_interval([1, 2, 3, 4], [False, False, True, True]) == (1.0, 1.0)


@given(LABELLED)
def test_average_precision_walks_the_thresholds(rows):
    scores, labels = split(rows)
    total, seen, area = sum(labels), 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        kept = [y for s, y in rows if s >= threshold]
        if total:
            area += (sum(kept) / total - seen) * sum(kept) / len(kept)
            seen = sum(kept) / total
    found = figures.average_precision(scores, labels)
    assert found is None if not total else found == pytest.approx(area, abs=1e-12)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40),
    st.sampled_from([1, 4, 15]),
)
def test_calibration_error_fills_the_bins(rows, bins):
    probabilities, labels = split(rows)
    filled: dict[int, list[tuple[float, bool]]] = {}
    for p, y in rows:
        place = next(b for b in range(bins) if p * bins <= b + 1)
        filled.setdefault(place, []).append((p, y))
    literal = sum(
        len(held) / len(rows) * abs(np.mean([p for p, _ in held]) - np.mean([y for _, y in held]))
        for held in filled.values()
    )
    assert figures.expected_calibration_error(probabilities, labels, bins) == pytest.approx(literal, abs=1e-12)
    assert figures.brier(probabilities, labels) == pytest.approx(
        sum((p - y) ** 2 for p, y in rows) / len(rows), abs=1e-12
    )


@pytest.mark.parametrize("true", [0.3, 1.0, 2.5], ids=["cold", "one", "hot"])
def test_the_temperature_minimises_the_likelihood(true):
    draw = np.random.default_rng(1)
    logits = draw.normal(scale=3, size=2000)
    labels = draw.random(2000) < 1 / (1 + np.exp(-logits / true))

    def loss(log_t: float) -> float:
        return float(np.mean(np.logaddexp(0, -np.where(labels, 1, -1) * logits / math.exp(log_t))))

    best = math.exp(optimize.minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-9}).x)
    found = figures.fit_temperature(logits, labels)
    assert found == pytest.approx(best, rel=1e-4)
    assert found == pytest.approx(true, rel=0.1)


def test_the_temperature_is_bounded_where_the_likelihood_is_not():
    assert figures.fit_temperature([-1, 1], [False, True]) == 1 / figures.HOTTEST
    assert figures.fit_temperature([-1, 1], [True, False]) == figures.HOTTEST


def test_the_figures_of_a_judge():
    logits = np.array([[-1.0, 2.0], [0.5, -3.0], [-2.0, -0.3], [-4.0, -5.0]])
    known = [{"a": False, "b": True}, None, {"a": False, "b": False}, {"a": False, "b": False}]
    found = figures.judge_figures(logits, [True, True, False, False], known, ["a", "b"], temperature=2.0)
    assert (found["n"], found["unsafe"], found["auroc"]) == (4, 2, 1.0)
    # h = sigmoid(1), sigmoid(0.25), sigmoid(-0.15) = 0.46, sigmoid(-2)
    assert (found["accuracy_0.4"], found["accuracy_0.5"]) == (0.75, 1.0)
    assert (found["flagged_0.4"], found["flagged_0.5"]) == (0.75, 0.5)
    assert found["categories"]["a"] == {"support": 0, "auroc": None, "average_precision": None}
    # Without the second row, whose categories are unknown.
    assert found["categories"]["b"] == {"support": 1, "auroc": 1.0, "average_precision": 1.0}
    assert found["calibrated"]["brier"] != found["uncalibrated"]["brier"]
    assert found["uncalibrated"]["brier"] == pytest.approx(
        np.mean((1 / (1 + np.exp(-logits.max(axis=1))) - [1, 1, 0, 0]) ** 2)
    )


@pytest.mark.parametrize(
    ("scores", "labels"),
    [([], []), ([1.0], [True, False]), ([math.nan], [True]), ([[1.0]], [[True]])],
    ids=["empty", "lengths", "nan", "matrix"],
)
def test_other_input_is_refused(scores, labels):
    with pytest.raises(ValueError, match="expected as many finite scores as labels"):
        figures.auroc(scores, labels)
