"""Repeated looks and searches: false certificates counted exactly by a dynamic programme, or by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from holdfast.certification import assessment as ltt
from holdfast.certification.binomial import most_regressions
from holdfast.certification.sequential import MIXTURE, EProcess, log_e_value

LOOKS = 3000


def ever_certified(rate: float, allowed: np.ndarray) -> float:
    """The probability that k <= allowed[t - 1] at any t, by carrying the distribution of k over paths not yet stopped.

    allowed[t - 1] is -1 where no count certifies after t prompts.
    """
    alive = np.zeros(len(allowed) + 1)
    alive[0], stopped = 1.0, 0.0
    for t, limit in enumerate(allowed, start=1):
        alive[1 : t + 1] = alive[1 : t + 1] * (1 - rate) + alive[:t] * rate
        alive[0] *= 1 - rate
        stopped += alive[: limit + 1].sum()
        alive[: limit + 1] = 0.0
    assert stopped + alive.sum() == pytest.approx(1, abs=1e-10)
    return float(stopped)


def e_process_limits(alpha: float, confidence: float, looks: int) -> np.ndarray:
    """The most regressions at which the e-value reaches 1/delta after t prompts; the e-value falls with k."""
    level = round(1 - confidence, 12)
    limits = np.full(looks, -1)
    k = 0
    for t in range(1, looks + 1):
        while log_e_value(t, k, alpha) >= -math.log(level):
            limits[t - 1] = k
            k += 1
        k = max(limits[t - 1], 0)
    return limits


@pytest.mark.parametrize(("alpha", "confidence"), [(0.05, 0.95), (0.1, 0.95), (0.02, 0.95), (0.05, 0.9), (0.3, 0.99)])
def test_looking_after_every_prompt_certifies_falsely_at_most_delta(alpha, confidence):
    limits = e_process_limits(alpha, confidence, LOOKS)
    wrong = ever_certified(alpha, limits)
    assert wrong <= round(1 - confidence, 12)
    assert wrong > 0.5 * (1 - confidence)  # the budget is used, so a broken process would show
    assert ever_certified(alpha * 1.02, limits) < wrong


def test_repeated_clopper_pearson_would_not():
    """The same programme finds the familiar fault: a fixed-n test looked at repeatedly."""
    allowed = np.array([-1 if (k := most_regressions(t, 0.05, 0.95)) is None else k for t in range(1, LOOKS + 1)])
    assert ever_certified(0.05, allowed) > 0.2
    sparse = np.where(np.arange(1, LOOKS + 1) % 50 == 0, allowed, -1)[:2000]
    sparse[:50] = -1
    assert 0.17 < ever_certified(0.05, sparse) < 0.22
    once = np.full(LOOKS, -1)
    once[-1] = allowed[-1]
    assert ever_certified(0.05, once) == pytest.approx(stats.binom.cdf(allowed[-1], LOOKS, 0.05))


def test_the_e_value_is_the_average_of_products():
    process, products = EProcess(0.05), np.ones(len(MIXTURE))
    random = np.random.default_rng(0)
    for _ in range(200):
        x = bool(random.random() < 0.02)
        p1 = 0.05 * MIXTURE
        products *= (p1 / 0.05) if x else (1 - p1) / (1 - 0.05)
        process.update(x)
        assert process.e_value == pytest.approx(products.mean(), rel=1e-10)


def test_one_factor_has_expectation_one_at_alpha_and_less_above():
    for alpha in (0.01, 0.05, 0.5):
        p1 = alpha * MIXTURE
        for rate in (alpha, 1.1 * alpha, 0.9):
            mean = rate * p1 / alpha + (1 - rate) * (1 - p1) / (1 - alpha)
            assert (mean <= 1 + 1e-14).all()
        assert np.exp(log_e_value(1, 1, alpha)) == pytest.approx((p1 / alpha).mean())


def test_prompts_until_certified_match_what_is_known():
    """alpha = 0.05: 88 prompts without a regression; the median at 2 % is near 243."""
    process = EProcess(0.05)
    while not process.update(False):
        pass
    assert process.certified_at == 88
    limits = e_process_limits(0.05, 0.95, 600)
    assert ever_certified(0.02, limits[:225]) < 0.5 < ever_certified(0.02, limits[:260])


@pytest.mark.parametrize("true", [0.02, 0.05, 0.2])
def test_the_anytime_bound_covers_at_all_looks_together(true):
    """A bound ever below the true rate means the e-value at the true rate has reached 1/delta: at most delta."""
    assert ever_certified(true, e_process_limits(true, 0.95, 1000)) <= 0.05
    random = np.random.default_rng(1)
    for _ in range(20):
        process = EProcess(0.001)
        process.update_many(random.random(int(random.integers(1, 400))) < true)
        bound = process.upper_bound()
        limit = -math.log(0.05)
        assert log_e_value(process.n, process.regressions, min(bound + 1e-9, 1 - 1e-12)) >= limit - 1e-6 or bound == 1
        assert log_e_value(process.n, process.regressions, bound - 1e-9) < limit


N, ALPHA, DELTA, RUNS = 300, 0.1, 0.05, 4000
RATES = {  # true regression rates at the ten strengths
    "nested": np.array([0.01, 0.02, 0.04, 0.06, 0.08, 0.1001, 0.12, 0.15, 0.2, 0.3]),
    "at the limit": np.full(10, 0.1001),
    "not monotone": np.array([0.02, 0.1001, 0.03, 0.1001, 0.02, 0.1001, 0.05, 0.1001, 0.02, 0.1001]),
    "violating first": np.array([0.1001, 0.01, 0.01, 0.1001, 0.01, 0.01, 0.01, 0.01, 0.01, 0.1001]),
}


def counts(pattern: str, random: np.random.Generator) -> np.ndarray:
    """Regressions of one run at each strength: nested fails share one uniform per prompt, others are independent."""
    uniform = random.random((N, 1)) if pattern == "nested" else random.random((N, 10))
    return (uniform < RATES[pattern]).sum(axis=0)


def violates(chosen: float | None, pattern: str) -> bool:
    return chosen is not None and bool(RATES[pattern][ltt.STRENGTHS.index(chosen)] > ALPHA)


@pytest.mark.parametrize("pattern", RATES)
def test_the_returned_strength_violates_at_most_delta(pattern):
    random = np.random.default_rng(7)
    wrong = greedy = 0
    tests = {k: ltt.Tested.binomial(1.0, k, N, ALPHA).p_value for k in range(N + 1)}
    for _ in range(RUNS):
        found = dict(zip(ltt.STRENGTHS, counts(pattern, random).tolist(), strict=True))
        tested = ltt.fixed_sequence(ltt.STRENGTHS, lambda s, f=found: ltt.Tested(s, f[s], N, tests[f[s]]), DELTA)  # type: ignore[misc]
        wrong += violates(ltt.largest(tested), pattern)
        passing = [s for s in ltt.STRENGTHS if tests[found[s]] <= DELTA]
        greedy += violates(max(passing, default=None), pattern)
    error = math.sqrt(DELTA * (1 - DELTA) / RUNS)
    assert wrong / RUNS <= DELTA + 3 * error
    if pattern == "at the limit":
        assert wrong / RUNS > DELTA / 2  # the level is used
        assert greedy / RUNS > 4 * DELTA  # the largest passing of all ten, without the sequence, breaks it
