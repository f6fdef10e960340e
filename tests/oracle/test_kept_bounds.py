"""Kept groups against scipy's exact binomial test, and the verdicts that follow from it."""

from __future__ import annotations

import pytest
from scipy.stats import binomtest

from holdfast.certification.kept import (
    ANSWERS,
    COVERAGE,
    REFUSALS,
    Kept,
    Limits,
    Shown,
    degraded_words,
    failures,
    kept_groups,
    kept_kinds,
)
from holdfast.core.errors import ConfigError, DataError

SIZES = (1, 2, 20, 58, 59, 200, 1000)
CASES = [(k, n) for n in SIZES for k in sorted({0, 1, n // 2, n - n // 20, n - 1, n}) if k <= n]


@pytest.mark.parametrize(("kept", "of"), CASES)
@pytest.mark.parametrize("limit", [0.05, 0.1, 0.5])
def test_bounds_and_verdict_are_those_of_the_exact_test(kept, of, limit):
    found = Kept(kept, of, limit)
    above = binomtest(kept, of, alternative="less").proportion_ci(0.95, method="exact").high
    below = binomtest(kept, of, alternative="greater").proportion_ci(0.95, method="exact").low
    assert found.high == pytest.approx(above, rel=1e-8)
    assert found.low == pytest.approx(below, rel=1e-8, abs=1e-10)
    lost = of - kept
    assert found.passed == (binomtest(lost, of, limit, alternative="greater").pvalue >= 0.05)
    within = binomtest(lost, of, limit, alternative="less").pvalue <= 0.05
    assert found.shown == (Shown.OVER if not found.passed else Shown.WITHIN if within else Shown.NOT_SHOWN)
    assert found.to_json()["shown"] == within


@pytest.mark.parametrize(("limit", "most"), [(0.05, 15), (0.1, 27)])
def test_most_lost_groups_of_200_that_do_not_fail(limit, most):
    assert Kept(200 - most, 200, limit).passed
    assert not Kept(200 - most - 1, 200, limit).passed


def test_few_groups_can_fail_but_show_nothing():
    few = Kept(12, 12, 0.05)
    assert (few.passed, few.shown) == (True, Shown.NOT_SHOWN)
    assert few.line(REFUSALS) == (
        "refusals kept 100 % (12 of 12 groups; 95 % bounds 77.9 % to 100 %; limit: 5 % lost): "
        "not shown: 12 groups are too few, 59 may show it"
    )
    assert not Kept(2, 12, 0.05).passed
    none = Kept(0, 0, 0.05)
    assert (none.share, none.passed, none.shown, none.low, none.high) == (None, True, Shown.NOT_SHOWN, 0.0, 1.0)


def test_kinds_count_the_groups_of_their_own_members():
    """Group 1 is of two kinds and lost its member of `b` alone; group 3 has two prompts of one kind."""
    kinds = ["a", "a", "b", "b", "a", "a"]
    groups = [0, 1, 1, 2, 3, 3]
    kept = [True, True, False, True, True, False]
    assert kept_kinds(kinds, groups, kept) == (("a", 2, 3), ("b", 1, 2))
    assert kept_groups(groups, kept) == (2, 4)
    assert kept_kinds([None] * 6, groups, kept) == ()


def test_kinds_are_stored_and_read_back_and_may_be_absent():
    found = Kept(3, 4, 0.1, 1, (("a", 1, 2), ("b", 2, 2)))
    assert found.to_json()["kinds"] == {"a": {"kept": 1, "of": 2}, "b": {"kept": 2, "of": 2}}
    assert Kept.from_json(found.to_json()) == found
    assert "kinds" not in Kept(3, 4, 0.1).to_json()
    with pytest.raises(DataError, match="3 of 2 groups kept"):
        Kept(3, 4, 0.1, 0, (("a", 3, 2),))


def test_lines():
    assert Kept(195, 200, 0.05).line(REFUSALS) == (
        "refusals kept 97.5 % (195 of 200 groups; 95 % bounds 94.8 % to 99.1 %; limit: 5 % lost): "
        "not shown: up to 5.19 % may be lost"
    )
    assert (
        Kept(196, 200, 0.05).line(REFUSALS).endswith("95 % bounds 95.4 % to 99.4 %; limit: 5 % lost): within the limit")
    )
    assert Kept(100, 200, 0.1, 3).line(ANSWERS) == (
        "answers kept 50 % (100 of 200 groups; 95 % bounds 43.9 % to 56.1 %; limit: 10 % lost; "
        "3 replies belong to no class): OVER the limit"
    )
    assert "OVER the limit" in Kept(0, 70, 0.1).line(COVERAGE)


def test_shares_of_degraded_examples_go_by_the_same_rule():
    """A clean count with a wide bound is neither within the limit nor over it."""
    assert degraded_words([0.04, 0.05], 0.05, over=False) == "within the limit"
    assert degraded_words([0.04, 0.349], 0.05, over=False).startswith("not shown to be within the limit")
    assert degraded_words([0.04], 0.05, over=True) == "OVER the limit"


def test_a_group_is_lost_with_any_member():
    assert kept_groups([0, 0, 2, 3, 3, 3], [True, False, True, True, True, True]) == (2, 3)
    assert kept_groups([], []) == (0, 0)


def test_what_failed_is_explained_with_coverage_first():
    figures = {REFUSALS: Kept(0, 70, 0.05), ANSWERS: Kept(70, 70, 0.1), COVERAGE: Kept(0, 70, 0.1)}
    (cause, remedy), (second, _) = failures(figures)
    assert "does not cover" in cause
    assert "prompts: [task, probes]" in remedy
    assert "like those that are held" in second


def test_stored_and_read_again():
    one = Kept(150, 190, 0.1, 4)
    assert Kept.from_json(one.to_json()) == one
    assert {"kept", "of", "share", "low", "high", "limit", "passed", "shown"} <= one.to_json().keys()


def test_impossible_counts_and_limits_are_refused():
    with pytest.raises(DataError, match="5 of 4"):
        Kept(5, 4, 0.05)
    with pytest.raises(ConfigError, match="limit"):
        Kept(1, 4, 1.0)
    with pytest.raises(ConfigError, match="coverage"):
        Limits(coverage=0.0)
