"""The order of the fixed sequence, and the comparisons."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest

from holdfast.certification import learn_then_test as ltt
from holdfast.certification.binomial import p_value
from holdfast.certification.comparison import compare_prompts, compare_seeds
from holdfast.core.errors import DataError


def test_strengths_are_exact_tenths():
    assert ltt.STRENGTHS == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def test_the_sequence_stops_at_its_first_failure():
    asked = []

    def test(strength: float) -> ltt.Tested:
        asked.append(strength)
        regressions = 50 if strength == 0.3 else 0
        return ltt.Tested(strength, regressions, 100, p_value(regressions, 100, 0.05))

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


def test_two_runs_without_a_violation_are_not_shown_equal_for_sure():
    found = compare_prompts([False] * 50, [False] * 50)
    assert found.p_value == 1.0
    assert found.lower == -found.upper < -0.05


def test_one_seed_is_no_evidence_about_training():
    with pytest.raises(DataError, match="1 seed, expected at least 2"):
        compare_seeds([0.1])


def test_three_seeds_are_called_weak():
    assert (
        "3 seeds are weak evidence: the interval is 2.5 standard deviations" in compare_seeds([0.0, 0.1, 0.3]).caution
    )
    assert compare_seeds([0.0, 0.1, 0.3, 0.2, 0.1]).caution is None
    same = compare_seeds([0.1, 0.1])
    assert (same.lower, same.upper) == (0.1, 0.1)
    assert same.to_json()["seeds"] == 2
