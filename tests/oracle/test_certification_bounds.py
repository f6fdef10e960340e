"""Exact tests and bounds against scipy.stats, against rational arithmetic, and against the published tables."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from holdfast.certification import assessment, binomial, finite_pool
from holdfast.certification.arguments import confidence_level
from holdfast.certification.certificate import certify_counts
from holdfast.certification.power import Design, groups_for_power, power
from holdfast.certification.share import certify_categories

CASES = [(k, n) for n in (1, 2, 7, 59, 100, 700, 5000, 100_000) for k in sorted({0, 1, n // 40, n // 2, n - 1, n})]
LEVELS = {0.9: Fraction(1, 10), 0.95: Fraction(1, 20), 0.99: Fraction(1, 100)}


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
def test_upper_bounds_equal_scipys_to_ten_digits_upwards(confidence):
    for k, n in CASES:
        found = binomial.upper_bound(k, n, confidence)
        root = stats.binomtest(k, n, alternative="less").proportion_ci(confidence, "exact").high
        assert found == pytest.approx(root, rel=1e-9, abs=1e-11), (k, n)  # its root search stops at 2e-12
        quantile = stats.beta.ppf(confidence, k + 1, n - k) if k < n else 1.0
        assert quantile * (1 - 1e-12) <= found <= quantile * (1 + 1e-9), (k, n)


def test_two_sided_intervals_equal_scipys():
    for k, n in CASES:
        expected = stats.binomtest(k, n).proportion_ci(0.95, "exact")
        assert binomial.interval(k, n) == pytest.approx((expected.low, expected.high), rel=1e-9, abs=1e-11)


def test_p_values_equal_scipys():
    for k, n in CASES:
        for alpha in (0.001, 0.05, 0.3, 0.95):
            expected = stats.binom.cdf(k, n, alpha)
            assert binomial.p_value(k, n, alpha) == pytest.approx(expected, rel=1e-10, abs=1e-300), (k, n, alpha)


def test_most_regressions_table():
    """alpha = delta = 0.05."""
    allowed = {59: 0, 100: 1, 200: 4, 300: 8, 500: 16, 700: 25, 1000: 38, 2000: 83, 5000: 224}
    assert {n: binomial.most_regressions(n, 0.05, 0.95) for n in allowed} == allowed
    assert binomial.most_regressions(58, 0.05, 0.95) is None


def test_fewest_prompts_table():
    needed = {0.2: 14, 0.1: 29, 0.05: 59, 0.02: 149, 0.01: 299}
    assert {alpha: binomial.fewest_prompts(alpha, 0.95) for alpha in needed} == needed
    for alpha, n in needed.items():
        assert n == math.ceil(math.log(0.05) / math.log(1 - alpha))
    assert binomial.fewest_prompts(0.05, 0.95, parts=14) == 110


POWER = {
    (0.05, 0.005): (93, 93, 124),
    (0.05, 0.01): (124, 153, 181),
    (0.05, 0.02): (234, 311, 386),
    (0.05, 0.03): (601, 832, 1036),
    (0.05, 0.04): (2698, 3701, 4654),
    (0.05, 0.0): (59, 59, 59),
    (0.10, 0.02): (61, 76, 89),
    (0.10, 0.05): (179, 239, 298),
    (0.10, 0.07): (549, 748, 934),
    (0.02, 0.005): (386, 456, 523),
    (0.02, 0.01): (969, 1271, 1567),
    (0.01, 0.002): (628, 773, 913),
    (0.01, 0.005): (1941, 2546, 3137),
}


@pytest.mark.parametrize(("alpha", "true_rate"), POWER)
def test_power_table(alpha, true_rate):
    found = tuple(groups_for_power(Design(alpha), true_rate, wanted)[0] for wanted in (0.8, 0.9, 0.95))
    assert found == POWER[alpha, true_rate]


@pytest.mark.parametrize(("alpha", "true_rate", "wanted"), [(0.05, 0.02, 0.9), (0.1, 0.05, 0.8), (0.2, 0.0, 0.5)])
def test_no_smaller_number_of_prompts_has_the_power(alpha, true_rate, wanted):
    n, k = groups_for_power(Design(alpha), true_rate, wanted)
    sizes = np.arange(1, n + 1)
    allowed = stats.binom.ppf(0.05, sizes, alpha).astype(int)
    allowed -= stats.binom.cdf(allowed, sizes, alpha) > 0.05  # ppf gives the first k at or above the level
    powers = np.where(allowed >= 0, stats.binom.cdf(allowed, sizes, true_rate), 0.0)
    assert allowed[-1] == k
    assert powers[-1] >= wanted > powers[:-1].max()
    assert power(n, Design(alpha), true_rate) == pytest.approx(powers[-1], rel=1e-10)


def certified_tau(degradations, alpha, confidence):
    level = confidence_level(confidence)
    return assessment.smallest_tau(
        degradations,
        lambda tau: binomial.p_value(int((~(degradations <= tau)).sum()), len(degradations), alpha) <= level,
    )


def test_ranks_of_the_order_statistic():
    """The smallest tau of 1, 2, ..., n is the rank; alpha = delta = 0.05."""
    expected = {100: 99, 200: 196, 500: 484, 700: 675, 1000: 962}
    assert {n: certified_tau(np.arange(1.0, n + 1), 0.05, 0.95) for n in expected} == expected


@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_the_rank_is_the_smallest_that_bounds_the_quantile(alpha, confidence):
    for n in (*range(1, 80), 299, 300, 1000, 4321):
        enough = stats.binom.cdf(np.arange(n), n, 1 - alpha) >= confidence  # entry r - 1 speaks of rank r
        expected = int(enough.argmax()) + 1 if enough.any() else None
        assert certified_tau(np.arange(1.0, n + 1), alpha, confidence) == expected, n


def test_clopper_pearson_and_order_statistic_agree_on_2000_cases():
    random = np.random.default_rng(3)
    verdicts = []
    for _ in range(2000):
        n = int(random.integers(59, 400))
        alpha, tau = float(random.choice([0.05, 0.1, 0.2])), 0.1
        degradations = random.normal(tau - random.uniform(0.1, 0.25), 0.1, n).round(2)  # rounding makes ties at tau
        degradations[random.random(n) < 0.01] = np.nan
        k = int((~(degradations <= tau)).sum())
        certified = certified_tau(degradations, alpha, 0.95)
        verdicts.append(binomial.upper_bound(k, n, 0.95) <= alpha)
        assert (certified is not None and certified <= tau) == verdicts[-1] == certify_counts(k, n, alpha).certified
    assert 500 < sum(verdicts) < 1500  # both verdicts are well represented


def binomial_cdf(k: int, n: int, rate: Fraction) -> Fraction:
    return sum((math.comb(n, i) * rate**i * (1 - rate) ** (n - i) for i in range(k + 1)), Fraction(0))


@pytest.mark.parametrize("confidence", LEVELS)
def test_false_certificates_in_rational_arithmetic(confidence):
    """The chance of a certificate at a true rate of alpha or just above never exceeds delta; nothing is rounded."""
    level = LEVELS[confidence]
    largest = Fraction(0)
    for alpha in (Fraction(1, 50), Fraction(1, 20), Fraction(1, 10), Fraction(3, 10), Fraction(19, 20)):
        for n in (*range(1, 40), 59, 93, 150, 311):
            allowed = binomial.most_regressions(n, float(alpha), confidence)
            if allowed is None:
                assert (1 - alpha) ** n > level, "0 regressions would certify"
                continue
            at_alpha = binomial_cdf(allowed, n, alpha)
            assert binomial_cdf(allowed, n, alpha + Fraction(1, 1000)) < at_alpha <= level
            assert allowed == n or binomial_cdf(allowed + 1, n, alpha) > level, "one more would do as well"
            largest = max(largest, at_alpha / level)
    assert largest > Fraction(9, 10)  # the level is nearly spent somewhere: the test is not idle


def test_false_certificates_of_large_samples():
    for alpha in (0.01, 0.05, 0.1):
        for n in range(300, 5000, 97):
            allowed = binomial.most_regressions(n, alpha, 0.95)
            wrong = stats.binom.pmf(np.arange(n + 1), n, alpha + 1e-6)[: allowed + 1].sum()
            assert wrong <= 0.05


def hypergeometric_cdf(k: int, n: int, pool: int, bad: int) -> Fraction:
    ways = sum(math.comb(bad, i) * math.comb(pool - bad, n - i) for i in range(min(k, n) + 1))
    return Fraction(ways, math.comb(pool, n))


@pytest.mark.parametrize("pool", [1, 5, 20, 30, 100, 157])
def test_false_certificates_of_a_list_in_rational_arithmetic(pool):
    """Over every number of bad prompts that breaks the claim, the chance of a certificate is at most delta."""
    for alpha in (Fraction(1, 20), Fraction(1, 10), Fraction(29, 100)):
        for n in range(1, pool + 1):
            certified = [k for k in range(n) if finite_pool.p_value(k, n, pool, float(alpha)) <= 0.05]
            allowed = max(certified, default=None)
            first = math.floor(alpha * pool) + 1
            if allowed is None:
                assert hypergeometric_cdf(0, n, pool, first) > Fraction(1, 20)
                continue
            for bad in {first, min(first + 1, pool), pool}:
                assert hypergeometric_cdf(allowed, n, pool, bad) <= Fraction(1, 20)
            assert allowed == n or hypergeometric_cdf(allowed + 1, n, pool, first) > Fraction(1, 20)


def test_hypergeometric_tails_equal_scipys():
    for pool, n, bad in [(100, 30, 6), (5000, 700, 251), (1_000_000, 20_000, 50_001), (200, 199, 100)]:
        expected = stats.hypergeom(pool, bad, n)
        for k in {0, int(expected.ppf(0.01)), int(expected.ppf(0.05)), int(expected.ppf(0.5)), int(expected.ppf(0.99))}:
            assert finite_pool.tail(k, n, pool, bad) == pytest.approx(expected.cdf(k), rel=1e-7, abs=1e-250)


def test_a_tie_certifies():
    """19 good of 20 with one bad allowed to hide: the chance is exactly 1/20."""
    assert finite_pool.p_value(0, 19, 20, 0.01) == 0.05
    assert certify_counts(0, 19, 0.01, pool=20).certified
    assert certify_counts(0, 1, alpha=0.95).certified  # P = 1 - 0.95, which floats put above 0.05
    assert 1 - 0.95 > 0.05


@pytest.mark.parametrize(("n", "pool", "confidence"), [(30, 100, 0.95), (19, 20, 0.95), (50, 51, 0.9), (1, 7, 0.99)])
def test_the_bound_on_bad_prompts_is_the_largest_not_ruled_out(n, pool, confidence):
    for k in range(n + 1):
        kept = [b for b in range(k, pool - n + k + 1) if hypergeometric_cdf(k, n, pool, b) > LEVELS[confidence]]
        assert finite_pool.upper_count(k, n, pool, confidence) == max(kept)


SIZES = (40, 37)


def singles(k: int, n: int):
    """n groups of one prompt, k of which regressed."""
    return np.arange(n) < k, np.arange(n)


@pytest.fixture(scope="module", params=[0.1, 0.3])
def categories(request):
    """alpha, every pair of counts of two categories, and their simultaneous bounds."""
    outcomes = [(i, j) for i in range(SIZES[0] + 1) for j in range(SIZES[1] + 1)]
    found = [
        certify_categories({"a": singles(i, SIZES[0]), "b": singles(j, SIZES[1])}, request.param) for i, j in outcomes
    ]
    bounds = [[verdict.upper_bound for verdict in pair.values()] for pair in found]
    return request.param, np.array(outcomes), np.array(bounds)


@pytest.mark.parametrize(
    "shares", [(1.001, 1.001), (1.001, 0.0), (0.2, 3.0), (0.7, 0.8), (0.3, 1.001), (0.25, 0.27), (0.39, 0.42)]
)
def test_category_verdicts_and_bounds_are_wrong_at_most_delta(categories, shares):
    """Summed over every pair of counts: the chance that any bound is below its true rate. A false verdict is one."""
    alpha, outcomes, bounds = categories
    truth = alpha * np.array(shares)
    chance = stats.binom.pmf(outcomes, SIZES, truth).prod(axis=1)
    wrong = chance[(bounds < truth).any(axis=1)].sum()
    assert wrong <= 0.05
    assert wrong > 0 or max(shares) < 1
