"""The slope of harm over the poison ratio."""

from __future__ import annotations

import math

import pytest
from tests.unit.tables.making import result_json, results

from holdfast.certification.comparison import compare_prompts, compare_seeds
from holdfast.tables.slope import slope
from holdfast.tables.verdicts import slopes


def cells(seed, harms):
    return [result_json("sft", ratio=p, seed=seed, HS=(h, h, h)) for p, h in harms.items()]


def test_the_slope_is_that_of_least_squares():
    found = slope(results(cells(1, {0.0: 0.1, 0.1: 0.3, 0.5: 0.2})))
    mean_p, mean_h = 0.2, 0.2
    pairs = ((0.0, 0.1), (0.1, 0.3), (0.5, 0.2))
    expected = sum((p - mean_p) * (h - mean_h) for p, h in pairs) / sum((p - mean_p) ** 2 for p, _ in pairs)
    assert found.value == pytest.approx(expected)
    assert (found.ratios, found.seeds) == ((0.0, 0.1, 0.5), 1)


def test_the_interval_of_one_seed_goes_against_each_weight():
    left, right = (0.2, 0.19, 0.24), (0.4, 0.37, 0.42)
    found = slope(results([result_json("sft", ratio=p, HS=figure) for p, figure in ((0.0, left), (0.5, right))]))
    assert found.value == pytest.approx(0.4)
    assert found.low == pytest.approx(0.4 - 2 * math.hypot(0.03, 0.04)), "the right end down, the left end up"
    assert found.high == pytest.approx(0.4 + 2 * math.hypot(0.02, 0.01))


def test_several_seeds_give_the_interval_over_seeds_and_half_run_seeds_are_left_out():
    full = [*cells(1, {0.0: 0.2, 0.5: 0.4}), *cells(2, {0.0: 0.2, 0.5: 0.3}), *cells(0, {0.0: 0.9})]
    found, expected = slope(results(full)), compare_seeds([0.4, 0.2])
    assert (found.value, found.low, found.high, found.seeds) == pytest.approx((0.3, expected.lower, expected.upper, 2))


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
