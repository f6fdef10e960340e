"""Order and refusals of the fixed sequence, Holm's correction and the comparisons."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest

from holdfast.certification import assessment as ltt
from holdfast.certification.comparison import compare_prompts, compare_seeds
from holdfast.certification.share import adjusted
from holdfast.core.errors import ConfigError, DataError


def test_strengths_are_exact_tenths():
    assert ltt.STRENGTHS == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def test_the_sequence_stops_at_its_first_failure():
    asked = []

    def test(strength: float) -> ltt.Tested:
        asked.append(strength)
        return ltt.Tested.binomial(strength, 50 if strength == 0.3 else 0, 100, 0.05)

    tested = ltt.fixed_sequence(ltt.STRENGTHS, test, 0.05)
    assert asked == [0.1, 0.2, 0.3]
    assert [t.passed for t in tested] == [True, True, False]
    assert ltt.largest(tested) == 0.2
    assert asdict(tested[2]) == {"strength": 0.3, "regressions": 50, "n": 100, "p_value": 1.0, "passed": False}


def test_all_strengths_may_pass_or_none():
    passing = ltt.fixed_sequence(ltt.STRENGTHS, lambda s: ltt.Tested(s, 0, 100, 0.01), 0.05)
    assert ltt.largest(passing) == 1.0
    failing = ltt.fixed_sequence(ltt.STRENGTHS, lambda s: ltt.Tested(s, 9, 100, 0.9, passed=True), 0.05)
    assert len(failing) == 1
    assert ltt.largest(failing) is None


def test_a_nan_p_value_fails():
    tested = ltt.fixed_sequence([0.5], lambda s: ltt.Tested(s, 0, 100, math.nan), 0.05)
    assert ltt.largest(tested) is None


@pytest.mark.parametrize("strengths", [[], [0.2, 0.1], [0.1, 0.1], [0.0, 0.5], [math.nan]])
def test_the_order_is_part_of_the_method(strengths):
    with pytest.raises(ConfigError, match="expected positive numbers in increasing order"):
        ltt.fixed_sequence(strengths, lambda s: ltt.Tested(s, 0, 100, 0.0), 0.05)


@pytest.mark.parametrize("level", [0, 1, math.nan, True])
def test_the_level_is_checked(level):
    with pytest.raises(ConfigError, match="expected 0 < level < 1"):
        ltt.fixed_sequence([0.5], lambda s: ltt.Tested(s, 0, 100, 0.0), level)


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan, True, None])
def test_holm_refuses_what_is_no_p_value(p):
    with pytest.raises(DataError, match="p-value of 'x'"):
        adjusted({"x": p, "y": 0.5})
    with pytest.raises(DataError, match="no p-values"):
        adjusted({})


def test_outcomes_must_be_truth_values_of_the_same_prompts():
    with pytest.raises(DataError, match="A has 2 prompts and B has 3"):
        compare_prompts([True, False], [True, False, True])
    with pytest.raises(DataError, match="A: outcomes of shape"):
        compare_prompts([], [])
    numbers: Any = [0.0, math.nan]
    with pytest.raises(DataError, match=r"B: outcomes .* float64"):
        compare_prompts([True, False], numbers)


def test_two_runs_without_a_violation_are_not_shown_equal_for_sure():
    found = compare_prompts([False] * 50, [False] * 50)
    assert found.p_value == 1.0
    assert found.lower == -found.upper < -0.05


def test_one_seed_is_no_evidence_about_training():
    with pytest.raises(DataError, match="1 seed, expected at least 2"):
        compare_seeds([0.1])
    with pytest.raises(DataError, match="difference is nan"):
        compare_seeds([0.1, math.nan])


def test_three_seeds_are_called_weak():
    assert (
        "3 seeds are weak evidence: the interval is 2.5 standard deviations" in compare_seeds([0.0, 0.1, 0.3]).caution
    )
    assert compare_seeds([0.0, 0.1, 0.3, 0.2, 0.1]).caution is None
    same = compare_seeds([0.1, 0.1])
    assert (same.lower, same.upper) == (0.1, 0.1)
    assert same.to_json()["seeds"] == 2
