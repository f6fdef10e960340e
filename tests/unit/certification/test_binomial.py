"""What the exact tests refuse, and how they read numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from holdfast.certification import assessment, binomial, finite_pool, power
from holdfast.certification.arguments import confidence_level, exact
from holdfast.core.errors import ConfigError, DataError, InfeasibleError


@pytest.mark.parametrize("alpha", [0, 1, -0.1, 1.5, math.nan, math.inf, True, "0.05", None])
def test_an_alpha_that_is_no_share_is_refused(alpha):
    for call in (
        lambda: binomial.p_value(0, 10, alpha),
        lambda: binomial.fewest_prompts(alpha),
        lambda: binomial.most_regressions(10, alpha),
        lambda: finite_pool.p_value(0, 10, 20, alpha),
    ):
        with pytest.raises(ConfigError, match=r"alpha = .*, expected a share with 0 < alpha < 1"):
            call()


@pytest.mark.parametrize("confidence", [0, 1, -1, 2, math.nan, True, "0.95", 0.499])
def test_a_confidence_below_one_half_or_no_share_is_refused(confidence):
    with pytest.raises(ConfigError, match=r"confidence = .*, expected 0.5 <= confidence < 1"):
        binomial.upper_bound(0, 10, confidence)


def test_delta_given_as_confidence_is_recognised():
    with pytest.raises(ConfigError, match=r"1 - 0.05 may be meant"):
        binomial.upper_bound(0, 10, 0.05)


@pytest.mark.parametrize(
    ("k", "n", "error", "message"),
    [
        (0, 0, DataError, "n = 0: no prompts"),
        (11, 10, DataError, "regressions = 11 of n = 10"),
        (-1, 10, ConfigError, "regressions = -1, expected a whole number >= 0"),
        (True, 10, ConfigError, "regressions = True"),
        (0, True, ConfigError, "n = True"),
        (1.0, 10, ConfigError, "regressions = 1.0"),
        (math.nan, 10, ConfigError, "regressions = nan"),
        (0, None, ConfigError, "n = None"),
    ],
)
def test_counts_that_are_no_counts_are_refused(k, n, error, message):
    for call in (
        lambda: binomial.p_value(k, n, 0.05),
        lambda: binomial.upper_bound(k, n),
        lambda: binomial.interval(k, n),
    ):
        with pytest.raises(error, match=message):
            call()


def test_numpy_numbers_are_numbers():
    assert binomial.p_value(np.int64(3), np.int32(200), np.float64(0.05)) == binomial.p_value(3, 200, 0.05)


def test_delta_is_read_in_decimals():
    assert confidence_level(0.95) == 0.05 != 1 - 0.95
    assert confidence_level(0.9) == 0.1
    assert confidence_level(0.95, 14) == float(exact(0.05) / 14)
    with pytest.raises(ConfigError, match="parts = 0"):
        confidence_level(0.95, 0)


@pytest.mark.parametrize(("alpha", "pool", "bad"), [(0.1, 30, 3), (0.29, 100, 29), (0.07, 100, 7), (0.05, 19, 0)])
def test_the_allowed_bad_prompts_are_counted_in_decimals(alpha, pool, bad):
    assert finite_pool.allowed_bad(pool, alpha) == bad


def test_all_regressed_bounds_nothing():
    assert binomial.upper_bound(7, 7) == 1.0
    assert binomial.p_value(7, 7, 0.05) == 1.0
    assert binomial.interval(0, 7)[0] == 0.0
    assert binomial.interval(7, 7)[1] == 1.0


def test_more_tests_for_one_delta_need_more():
    bounds = [binomial.upper_bound(2, 100, parts=m) for m in (1, 2, 14)]
    assert bounds == sorted(bounds)
    assert len(set(bounds)) == 3
    assert binomial.most_regressions(100, 0.05, parts=1) == 1
    assert binomial.most_regressions(100, 0.05, parts=4) == 0


def test_an_alpha_of_nothing_is_refused_without_an_endless_search():
    with pytest.raises(ConfigError, match=r"needs more than 1e\+15 prompts"):
        binomial.fewest_prompts(1e-300)


def test_a_sample_larger_than_its_list_is_refused():
    with pytest.raises(DataError, match="n = 21 prompts from a list of 20"):
        finite_pool.p_value(0, 21, 20, 0.05)


def test_the_whole_list_is_needed_when_nothing_may_be_bad():
    assert finite_pool.fewest_prompts(10, 0.01, 0.95) == 10
    assert finite_pool.fewest_prompts(1_000_000, 0.05) == 59  # a long list is like an open source
    assert finite_pool.fewest_prompts(100, 0.05) < 59


def test_nan_degradations_never_certify():
    def tau(values):
        degradations = np.array(values)
        return assessment.smallest_tau(
            degradations, lambda at: binomial.p_value(int((~(degradations <= at)).sum()), len(values), 0.05) <= 0.05
        )

    assert tau([0.0] * 58 + [math.nan]) is None
    assert tau([0.0] * 58 + [math.inf]) is None
    assert tau([0.0] * 59) == 0.0
    assert tau([0.0] * 58) is None  # too few
    assert tau([0.0] * 92 + [math.nan]) == 0.0


def test_power_beyond_alpha_is_refused():
    for rate in (0.05, 0.2):
        with pytest.raises(InfeasibleError, match=r"is not below alpha = 0\.05"):
            power.groups_for_power(power.Design(), rate, 0.9)
    with pytest.raises(InfeasibleError, match="more than 1,000,000 groups"):
        power.groups_for_power(power.Design(1e-5), 9e-6, 0.9)
    with pytest.raises(ConfigError, match="power = 1, expected a share"):
        power.groups_for_power(power.Design(), 0.01, 1)


def test_power_is_a_saw_and_its_first_tooth_is_found():
    n, k = power.groups_for_power(power.Design(), 0.02, 0.9)
    assert power.power(n, power.Design(), 0.02) >= 0.9 > power.power(n + 10, power.Design(), 0.02)
    assert power.power(58, power.Design(), 0.0) == 0.0
    assert binomial.most_regressions(n, 0.05) == k


def test_the_largest_true_rate_has_the_power():
    rate = power.largest_true_rate(200, power.Design(), 0.8)
    assert power.power(200, power.Design(), rate) == pytest.approx(0.8, rel=1e-9)
    assert power.largest_true_rate(58, power.Design(), 0.8) is None


def test_a_hundred_thousand_prompts_are_planned():
    n, k = power.groups_for_power(power.Design(), 0.048, 0.9)
    assert 90_000 < n < 110_000
    assert binomial.fewest_prompts(0.05, 0.95, k) == n
