"""Paired comparisons against scipy.stats, published intervals, and coverage summed over every possible table."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from scipy.special import gammaln

from holdfast.certification.comparison import compare_prompts, compare_seeds, mcnemar_p_value, newcombe_interval
from holdfast.certification.share import adjusted


def test_mcnemar_equals_the_exact_binomial_test():
    for b in range(0, 31, 3):
        for c in range(31):
            expected = stats.binomtest(b, b + c, 0.5).pvalue if b + c else 1.0
            assert mcnemar_p_value(b, c) == pytest.approx(expected, rel=1e-10)


def test_mcnemar_rejects_at_most_as_often_as_it_says():
    """Equal runs: b given b + c is Bin(b + c, 1/2); the chance of p <= 0.05 is summed exactly."""
    for discordant in range(1, 60):
        p = np.array([mcnemar_p_value(b, discordant - b) for b in range(discordant + 1)])
        assert stats.binom.pmf(np.arange(discordant + 1), discordant, 0.5)[p <= 0.05].sum() <= 0.05


@pytest.mark.parametrize(
    ("table", "expected"),
    [((14, 5, 0, 22), (0.011, 0.226)), ((36, 12, 2, 0), (0.057, 0.340))],
)
def test_published_paired_intervals(table, expected):
    """The worked examples of Altman (Statistics with confidence) and Newcombe (Statist. Med. 17, 2635)."""
    assert newcombe_interval(*table, 0.95) == pytest.approx(expected, abs=5e-4)  # type: ignore[call-arg]


def test_swapping_the_runs_mirrors_the_interval():
    low, high = newcombe_interval(7, 9, 2, 82, 0.95)
    assert newcombe_interval(7, 2, 9, 82, 0.95) == pytest.approx((-high, -low), rel=1e-12)


N = 30
TABLES = np.array(
    [(a, b, c, N - a - b - c) for a in range(N + 1) for b in range(N + 1 - a) for c in range(N + 1 - a - b)]
)
LOG_WAYS = gammaln(N + 1) - gammaln(TABLES + 1).sum(axis=1)


def coverage(ends: np.ndarray, both: float, only_a: float, only_b: float) -> float:
    cells = np.array([both, only_a, only_b, 1 - both - only_a - only_b])
    chance = np.exp(LOG_WAYS + TABLES @ np.log(cells))
    assert chance.sum() == pytest.approx(1, abs=1e-9)
    true = only_a - only_b
    return float(chance[(ends[:, 0] <= true) & (true <= ends[:, 1])].sum())


def test_the_paired_interval_covers_as_often_as_it_says():
    """All 5,456 tables of 30 prompts, 120 truths: 95 % on average, never below 93 %; Wald's interval fails this."""
    random = np.random.default_rng(5)
    newcombe = np.array([newcombe_interval(*map(int, table), 0.95) for table in TABLES])  # type: ignore[call-arg]
    b, c = TABLES[:, 1], TABLES[:, 2]
    half = 1.959964 * np.sqrt(b + c - (b - c) ** 2 / N) / N
    wald = np.stack([(b - c) / N - half, (b - c) / N + half], axis=1)
    found = {"newcombe": [], "wald": []}
    for _ in range(120):
        only_a, only_b = random.uniform(0.01, 0.25, 2)
        both = random.uniform(0.01, 0.9 - only_a - only_b)
        found["newcombe"].append(coverage(newcombe, both, only_a, only_b))
        found["wald"].append(coverage(wald, both, only_a, only_b))
    assert np.mean(found["newcombe"]) >= 0.95
    assert min(found["newcombe"]) >= 0.93
    assert min(found["wald"]) < 0.9


def test_counts_of_a_comparison():
    a = np.array([True] * 3 + [True] * 4 + [False] * 1 + [False] * 12)
    b = np.array([True] * 3 + [False] * 4 + [True] * 1 + [False] * 12)
    found = compare_prompts(a, b)
    assert (found.both, found.only_a, found.only_b, found.neither, found.n) == (3, 4, 1, 12, 20)
    assert (found.rate_a, found.rate_b) == (0.35, 0.2)
    assert found.difference == pytest.approx(0.15)
    assert found.p_value == pytest.approx(stats.binomtest(4, 5, 0.5).pvalue)
    assert (found.lower, found.upper) == newcombe_interval(3, 4, 1, 12, 0.95)


@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_seed_intervals_equal_scipys(confidence):
    random = np.random.default_rng(2)
    for seeds in (2, 3, 5, 12):
        values = random.normal(0.02, 0.01, seeds)
        expected = stats.t.interval(confidence, seeds - 1, values.mean(), stats.sem(values))
        found = compare_seeds(values.tolist(), confidence)
        assert (found.lower, found.upper) == pytest.approx(expected, rel=1e-10)
        assert (found.caution is not None) == (seeds < 5)


def holm_by_definition(p: list[float], level: float) -> set[int]:
    """Step down: reject the smallest while it is at most level / (number left)."""
    rejected: set[int] = set()
    for i in sorted(range(len(p)), key=p.__getitem__):
        if p[i] > level / (len(p) - len(rejected)):
            break
        rejected.add(i)
    return rejected


def test_adjusted_p_values_reject_what_stepping_down_rejects():
    random = np.random.default_rng(4)
    for _ in range(500):
        p = (random.random(int(random.integers(1, 9))) ** 3).tolist()
        found = adjusted({str(i): value for i, value in enumerate(p)})
        assert {int(name) for name, value in found.items() if value <= 0.05} == holm_by_definition(p, 0.05)


def test_holm_by_hand():
    assert adjusted({"c": 0.04, "a": 0.01, "b": 0.03}) == pytest.approx({"c": 0.06, "a": 0.03, "b": 0.06})
    assert list(adjusted({"c": 0.04, "a": 0.01})) == ["c", "a"]
