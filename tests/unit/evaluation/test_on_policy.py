"""On-policy regression: a rise of the judge's probability beyond tau, and every doubt counts as one."""

from __future__ import annotations

import math

import pytest
from scipy.stats import beta

from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError, DataError, UnsupportedError
from holdfast.judging.judge import UNSCORED, Judgement, Verdict
from holdfast.judging.on_policy import OnPolicy, degradations, harm_of

SAFE, UNSAFE = Judgement(Verdict.SAFE), Judgement(Verdict.UNSAFE)


def scored(value: float) -> Judgement:
    return Judgement(Verdict.UNSAFE if value > 0.4 else Verdict.SAFE, value)


def test_rises_are_differences_of_probabilities():
    before = [scored(0.25), scored(0.75), scored(0.5), UNSCORED, scored(0.1)]
    after = [scored(0.75), scored(0.25), scored(0.5), scored(0.0), UNSCORED]
    found = degradations(before, after).tolist()
    assert found[:3] == [0.5, -0.5, 0.0]
    assert all(math.isnan(value) for value in found[3:])


def test_counts_and_bound():
    before = [scored(0.25)] * 20
    after = [scored(0.25)] * 16 + [scored(0.5), scored(0.375), UNSCORED, scored(0.0)]
    found = OnPolicy.of(before, after, 0.125)  # 0.375 - 0.25 is tau itself: not beyond it
    assert found.to_json() == {
        "tau": 0.125, "n": 20, "regressions": 2, "unscored": 1, "rate": 0.1,
        "upper": pytest.approx(beta.ppf(0.95, 3, 18), rel=1e-8),
    }  # fmt: skip


def test_a_judge_without_probabilities_counts_flips():
    pairs = {
        (SAFE, SAFE): 0, (SAFE, UNSAFE): 1, (SAFE, UNSCORED): math.nan,
        (UNSAFE, SAFE): 0, (UNSAFE, UNSAFE): 0, (UNSAFE, UNSCORED): 0,
        (UNSCORED, SAFE): 0, (UNSCORED, UNSAFE): math.nan, (UNSCORED, UNSCORED): math.nan,
    }  # fmt: skip
    found = degradations([was for was, _ in pairs], [now for _, now in pairs])
    assert found.tolist() == pytest.approx(list(pairs.values()), nan_ok=True)
    counted = OnPolicy.of([was for was, _ in pairs], [now for _, now in pairs], 0.9)
    assert (counted.regressions, counted.unscored) == (4, 5)


def test_a_probability_missing_among_others_is_no_score():
    found = OnPolicy.of([scored(0.1), scored(0.1)], [SAFE, scored(0.1)], 0.1)
    assert (found.regressions, found.n) == (1, 2)


def test_a_probability_beside_no_verdict_is_not_believed():
    assert harm_of(Judgement(Verdict.UNSCORED, 0.0)) is None


@pytest.mark.parametrize("tau", [-0.1, 1.0, 5.0, math.nan, math.inf])
def test_a_tau_that_is_no_difference_of_probabilities_is_refused(tau):
    with pytest.raises(ConfigError, match="expected 0 <= tau < 1"):
        OnPolicy.of([scored(0.1)], [scored(0.1)], tau)


@pytest.mark.parametrize("sides", [([], []), ([SAFE], []), ([SAFE], [SAFE, SAFE])], ids=["none", "one side", "two"])
def test_sides_that_do_not_match_are_refused(sides):
    with pytest.raises(DataError, match="expected as many, and at least one"):
        degradations(*sides)


def test_training_on_it_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="'on_policy' cannot be trained on") as refusal:
        ChanceConstraint(unit="on_policy")
    assert "holdfast certify --judge" in refusal.value.remedy
    assert refusal.value.exit_code == 2
