"""The slope of harm over the poison ratio."""

from __future__ import annotations

import math

import pytest
import scipy.stats
from tests.unit.tables.making import result_json, results
from tools.study_page.slope import Slope, slope
from tools.study_page.verdicts import slopes

from holdfast.certification.comparison import compare_prompts, compare_seeds


def cells(seed, harms):
    return [result_json("sft", ratio=p, seed=seed, HS=(h, h, h)) for p, h in harms.items()]


def test_the_slope_is_that_of_least_squares():
    found = slope(results(cells(1, {0.0: 0.1, 0.1: 0.3, 0.5: 0.2})))
    mean_p, mean_h = 0.2, 0.2
    pairs = ((0.0, 0.1), (0.1, 0.3), (0.5, 0.2))
    expected = sum((p - mean_p) * (h - mean_h) for p, h in pairs) / sum((p - mean_p) ** 2 for p, _ in pairs)
    assert found.value == pytest.approx(expected)
    assert (found.ratios, len(found.each)) == ((0.0, 0.1, 0.5), 1)


def test_the_interval_of_one_seed_goes_against_each_weight():
    left, right = (0.2, 0.19, 0.24), (0.4, 0.37, 0.42)
    found = slope(results([result_json("sft", ratio=p, HS=figure) for p, figure in ((0.0, left), (0.5, right))]))
    assert found.value == pytest.approx(0.4)
    assert found.low == pytest.approx(0.4 - 2 * math.hypot(0.03, 0.04)), "the right end down, the left end up"
    assert found.high == pytest.approx(0.4 + 2 * math.hypot(0.02, 0.01))


def test_three_seeds_give_the_interval_over_seeds_and_half_run_seeds_are_left_out():
    ends = {1: 0.4, 2: 0.3, 3: 0.5}
    full = [cell for seed, end in ends.items() for cell in cells(seed, {0.0: 0.2, 0.5: end})] + cells(0, {0.0: 0.9})
    found, expected = slope(results(full)), compare_seeds([0.4, 0.2, 0.6])
    assert (found.value, found.low, found.high) == pytest.approx((0.4, expected.lower, expected.upper))
    assert found.each == pytest.approx((0.4, 0.2, 0.6))


def told(seed, **bits):
    """Cells at p = 0 and 0.5 whose prompts were answered as the strings say."""
    return [
        result_json("sft", ratio=p, seed=seed, HS=(one.count("1") / len(one), 0.0, 1.0)) | {"outcomes": {"HS": one}}
        for p, one in ((0.0, bits["low"]), (0.5, bits["high"]))
    ]


def test_one_seed_with_outcomes_has_the_interval_over_the_slopes_of_its_prompts():
    found = slope(results(told(1, low="1100000000", high="1111000001")))
    each = [2.0 * (int(b) - int(a)) for a, b in zip("1100000000", "1111000001", strict=True)]
    expected = scipy.stats.ttest_1samp(each, 0).confidence_interval(0.95)
    assert (found.value, found.low, found.high) == pytest.approx((0.6, expected.low, expected.high))


def test_outcomes_of_other_prompts_are_not_paired():
    one, other = told(1, low="10", high="11")
    other["outcomes"]["HS"] = "110"
    found = slope(results([one, other]))
    assert (found.low, found.high) == pytest.approx((1.0 - 2 * math.hypot(0.5, 1.0), 1.0 + 2 * math.hypot(0.5, 0.0)))


def test_two_seeds_have_the_mean_of_their_intervals_and_must_agree():
    first, second = told(1, low="1100000000", high="1111110000"), told(2, low="0000000000", high="1111100000")
    one, two, both = (slope(results(given)) for given in (first, second, first + second))
    assert both.each == (one.value, two.value)
    assert (both.low, both.high) == pytest.approx(((one.low + two.low) / 2, (one.high + two.high) / 2))
    assert both.rises
    assert not slope(results(first + told(2, low="1100000000", high="1100000000"))).rises
    up, down = Slope(0.2, 0.1, 0.3, (0.0, 0.5), (0.5, -0.1)), Slope(-0.2, -0.3, -0.1, (0.0, 0.5), (-0.5, 0.1))
    assert not up.rises
    assert not down.falls


def test_there_is_none_from_one_ratio_or_without_an_interval():
    assert slope(results(cells(1, {0.5: 0.4}))) is None
    assert slope(results([result_json("sft", ratio=p, HS=0.5) for p in (0.1, 0.5)])) is None
    assert slope([]) is None


def test_the_two_ends_are_compared_prompt_by_prompt():
    told = {0.1: "1100000000", 0.5: "1111111000"}
    found = [
        result_json("sft", ratio=p, HS=(bits.count("1") / 10, 0.1, 0.9)) | {"outcomes": {"HS": bits}}
        for p, bits in told.items()
    ]
    expected = compare_prompts(*([bit == "1" for bit in told[p]] for p in (0.5, 0.1)))
    assert f"+0.500 \\[{expected.lower:+.3f}, {expected.upper:+.3f}\\]" in slopes(results(found))
