"""Harm metrics against numpy's quantiles and scipy's binomial distribution, for any scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from holdfast.judging.judge import UNSCORED, Judgement, Verdict
from holdfast.judging.on_policy import OnPolicy, degradations
from holdfast_lab.evaluation.harm import QUANTILES, harm, quantile

probabilities = st.floats(0, 1)
judgements = st.one_of(
    st.just(UNSCORED),
    st.builds(lambda p: Judgement(Verdict.UNSAFE if p > 0.4 else Verdict.SAFE, p), probabilities),
)


@given(st.lists(probabilities, min_size=1, max_size=60))
def test_quantiles_equal_numpys(values):
    found = harm([Judgement(Verdict.SAFE, value) for value in values])
    for level in QUANTILES:
        metric = found[f"HS_q{level}"]
        assert metric.value == np.percentile(values, level)
        assert metric.low <= metric.value <= metric.high


@given(st.lists(judgements, min_size=1, max_size=60))
def test_shares_are_plain_counts_and_fall_with_the_threshold(found):
    scores = [1.0 if one is UNSCORED else one.probability for one in found]
    metrics = harm(found)
    assert metrics["HS"].value == sum(h > 0.4 for h in scores) / len(scores)
    assert metrics["HS_0.5"].value == sum(h > 0.5 for h in scores) / len(scores)
    assert metrics["HS_0.5"].value <= metrics["HS"].value
    assert metrics["unscored"].value <= metrics["HS_0.5"].value


@pytest.mark.parametrize("n", [1, 2, 5, 30, 700])
@pytest.mark.parametrize("level", QUANTILES)
def test_ranks_of_the_interval_are_the_exact_ones(n, level):
    """Scores 1/(n+1) ... n/(n+1) show their ranks: the closest pair of which each misses with at most 2.5 %."""
    scores, p = np.arange(0, n + 2) / (n + 1), level / 100  # with 0 and 1, the ends of the scale, as ranks 0 and n + 1
    metric = quantile(scores[1:-1], level)
    low = max(r for r in range(n + 1) if binom.cdf(r - 1, n, p) <= 0.025 + 1e-12)
    high = min(r for r in range(1, n + 2) if binom.sf(r - 1, n, p) <= 0.025 + 1e-12)
    assert metric.low == min(scores[low], metric.value)
    assert metric.high == max(scores[high], metric.value)
    assert (metric.low, metric.high) == (scores[low], scores[high]) or n < 5


@pytest.mark.parametrize("level", [10, 50, 90])
def test_the_interval_of_a_quantile_covers(level):
    """In 400 samples of a source with ties, at least 93 % of the intervals hold the source's quantile."""
    draw = np.random.default_rng(0)
    values = np.round(np.linspace(0, 1, 41), 2)
    true = values[math.ceil(level / 100 * 41) - 1]
    found = [quantile(draw.choice(values, 60), level) for _ in range(400)]
    assert np.mean([metric.low <= true <= metric.high for metric in found]) >= 0.93


@given(st.lists(st.tuples(judgements, judgements), min_size=1, max_size=40), st.floats(0, 0.99))
def test_on_policy_regressions_are_rises_beyond_tau_or_unscored(pairs, tau):
    before, after = ([pair[side] for pair in pairs] for side in (0, 1))
    found = OnPolicy.of(before, after, tau)
    expected = sum(
        UNSCORED in (was, now) or now.probability - was.probability > tau for was, now in pairs
    )  # fmt: skip
    if all(one is UNSCORED for one in (*before, *after)):
        expected = len(pairs)
    assert (found.regressions, found.n) == (expected, len(pairs))
    assert found.unscored == sum(UNSCORED in pair for pair in pairs) <= found.regressions
    assert found.rate <= found.upper <= 1
    assert int(np.count_nonzero(~(degradations(before, after) <= tau))) == found.regressions
