"""What holds for every count, rate and confidence: the two views of the test agree, and bounds move the right way."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast.certification import binomial, finite_pool
from holdfast.certification.arguments import confidence_level, exact
from holdfast.certification.assessment import smallest_tau
from holdfast.certification.certificate import certify_counts
from holdfast.certification.sequential import EProcess
from holdfast.certification.share import certify_categories, share_test
from holdfast.certification.terms import statement
from holdfast.core.errors import InfeasibleError

sizes = st.one_of(st.integers(1, 60), st.integers(1, 100_000))
rates = st.one_of(st.sampled_from([0.01, 0.05, 0.1, 0.2, 0.95]), st.floats(1e-6, 1 - 1e-6))
confidences = st.one_of(st.sampled_from([0.5, 0.75, 0.9, 0.95, 0.99]), st.floats(0.5, 1 - 1e-6))
shares = st.sampled_from([1, 1, 2, 3, 7, 14])


@st.composite
def counts(draw):
    n = draw(sizes)
    return draw(st.one_of(st.integers(0, n), st.integers(0, min(n, 5)))), n


@settings(max_examples=400, deadline=None)
@given(counts(), rates, confidences, shares)
def test_p_value_and_upper_bound_agree(count, alpha, confidence, parts):
    k, n = count
    certified = binomial.p_value(k, n, alpha) <= confidence_level(confidence, parts)
    assert certified == (binomial.upper_bound(k, n, confidence, parts=parts) <= alpha)


@settings(max_examples=400, deadline=None)
@given(counts(), confidences, shares, st.integers(-3, 3), st.sampled_from([0.0, 1e-16, 1e-12, 1e-11, 1e-10, 1e-9]))
def test_they_agree_at_the_bound_itself_and_a_rounding_away(count, confidence, parts, steps, relative):
    """The hardest alphas: the bound, its neighbouring floats, and points inside one step of the grid."""
    k, n = count
    bound = binomial.upper_bound(k, n, confidence, parts=parts)
    for near in (bound * (1 - relative), bound * (1 + relative), bound):
        alpha = near + steps * math.ulp(near)
        if 0 < alpha < 1:
            certified = binomial.p_value(k, n, alpha) <= confidence_level(confidence, parts)
            assert certified == (bound <= alpha), alpha


@settings(max_examples=200, deadline=None)
@given(counts(), rates, confidences)
def test_most_regressions_is_the_last_count_that_certifies(count, alpha, confidence):
    k, n = count
    most = binomial.most_regressions(n, alpha, confidence)
    certified = binomial.p_value(k, n, alpha) <= confidence_level(confidence)
    assert certified == (most is not None and k <= most)


@settings(max_examples=200, deadline=None)
@given(rates, confidences, st.integers(0, 40), shares)
def test_fewest_prompts_is_the_first_that_certifies(alpha, confidence, k, parts):
    n, level = binomial.fewest_prompts(alpha, confidence, k, parts=parts), confidence_level(confidence, parts)
    assert binomial.p_value(k, n, alpha) <= level
    assert n == k + 1 or binomial.p_value(k, n - 1, alpha) > level


@settings(max_examples=200, deadline=None)
@given(counts(), rates, confidences, shares)
def test_the_certificate_refuses_or_agrees_with_itself(count, alpha, confidence, openings):
    k, n = count
    try:
        found = certify_counts(k, n, alpha, confidence, openings=openings)
    except InfeasibleError:
        assert n < binomial.fewest_prompts(alpha, confidence, parts=openings)
        return
    assert found.certified == (found.upper_bound <= alpha)
    assert found.statement.startswith("Not certified") != found.certified


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 400), st.floats(0.01, 0.6), confidences)
def test_a_list_of_prompts_agrees_with_its_bound(data, pool, alpha, confidence):
    n = data.draw(st.integers(1, pool))
    k = data.draw(st.integers(0, n))
    certified = finite_pool.p_value(k, n, pool, alpha) <= confidence_level(confidence)
    assert certified == (finite_pool.upper_count(k, n, pool, confidence) <= finite_pool.allowed_bad(pool, alpha))
    if n == pool:
        assert finite_pool.upper_count(k, n, pool, confidence) == k
        assert certified == (k <= finite_pool.allowed_bad(pool, alpha))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.floats(-1, 1), st.sampled_from([0.1, math.nan, math.inf])), min_size=1, max_size=200),
    st.sampled_from([0.05, 0.1, 0.3]),
    st.sampled_from([0.1, 0.0, -0.5]),
)
def test_the_certified_tau_is_the_verdict_at_every_tau(degradations, alpha, tau):
    values = np.array(degradations)
    regressions = int((~(values <= tau)).sum())
    certified = smallest_tau(
        values, lambda at: binomial.p_value(int((~(values <= at)).sum()), len(values), alpha) <= 0.05
    )
    at_tau = binomial.p_value(regressions, len(values), alpha) <= 0.05
    assert at_tau == (certified is not None and certified <= tau)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), max_size=150), st.integers(0, 150), st.sampled_from([0.05, 0.3, 0.6]))
def test_a_sequence_does_not_depend_on_how_it_is_cut(outcomes, cut, alpha):
    whole, pieces = EProcess(alpha), EProcess(alpha)
    whole.update_many(outcomes)
    pieces.update_many(outcomes[:cut])
    for outcome in outcomes[cut:]:
        pieces.update_many([outcome])
    assert pieces.to_json() == whole.to_json()
    assert pieces.e_value == whole.e_value
    assert whole.certified == (whole.upper_bound() <= alpha)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.text(max_size=3), st.tuples(st.integers(0, 6), st.integers(1, 400)), min_size=1, max_size=6),
    st.sampled_from([1, 2]),
)
def test_category_bounds_fit_their_verdicts(counted, openings):
    counted = {name: (min(k, n), n) for name, (k, n) in counted.items()}
    needed = binomial.fewest_prompts(0.05, 0.95, parts=openings * len(counted))
    assume(max(n for _, n in counted.values()) >= needed)
    measured = {name: (np.arange(n) < k, np.arange(n)) for name, (k, n) in counted.items()}
    for name, verdict in certify_categories(measured, 0.05, 0.95, openings=openings).items():
        assert verdict.certified == (verdict.upper_bound <= 0.05)
        assert (verdict.needed is not None) == (counted[name][1] < needed)


@st.composite
def measured_groups(draw):
    """Groups of near-duplicates as (size, regressed), few of them regressed."""
    sizes = draw(st.lists(st.one_of(st.integers(1, 3), st.integers(1, 60)), min_size=1, max_size=150))
    failed = draw(st.lists(st.integers(0, 60), max_size=6))
    return [(size, min(size, failed[i]) if i < len(failed) else 0) for i, size in enumerate(sizes)]


def prompts(groups):
    outcomes = [i < failed for size, failed in groups for i in range(size)]
    return np.array(outcomes, dtype=bool), np.repeat(np.arange(len(groups)), [size for size, _ in groups])


units = st.sampled_from([{}, {"drawn": "rows"}, {"max_weight": 1}, {"max_weight": 4}, {"max_weight": 50}])


@settings(max_examples=200, deadline=None)
@given(measured_groups(), units, rates, confidences, shares)
def test_a_share_is_certified_exactly_when_its_bound_is_at_most_alpha(groups, unit, alpha, confidence, parts):
    found = share_test(*prompts(groups), alpha=alpha, confidence=confidence, parts=parts, **unit)
    assert found.certified == (found.upper_bound <= alpha)
    assert found.certified == (found.p_value <= confidence_level(confidence, parts))
    if found.rows.regressions > exact(alpha) * found.rows.n:
        assert not found.certified
    assert statement(found).startswith("Not certified") != found.certified


@settings(max_examples=100, deadline=None)
@given(measured_groups(), units, confidences, st.integers(-2, 2), st.sampled_from([0.0, 1e-12, 1e-10, 1e-9]))
def test_a_share_and_its_bound_agree_at_the_bound_itself(groups, unit, confidence, steps, relative):
    bound = share_test(*prompts(groups), alpha=0.999999, confidence=confidence, **unit).upper_bound
    for near in (bound * (1 - relative), bound * (1 + relative)):
        alpha = near + steps * math.ulp(near)
        if 0 < alpha < 1:
            found = share_test(*prompts(groups), alpha=alpha, confidence=confidence, **unit)
            assert found.certified == (found.upper_bound <= alpha)


@settings(max_examples=100, deadline=None)
@given(measured_groups(), units, st.sampled_from([0.05, 0.2, 0.5]), st.data())
def test_one_regression_more_never_helps(groups, unit, alpha, data):
    failed, group = prompts(groups)
    worse = failed.copy()
    worse[data.draw(st.integers(0, len(failed) - 1))] = True
    before, after = (share_test(one, group, alpha=alpha, **unit) for one in (failed, worse))
    assert after.p_value >= before.p_value
    assert after.upper_bound >= before.upper_bound


@settings(max_examples=100, deadline=None)
@given(measured_groups(), units, st.randoms(use_true_random=False))
def test_neither_order_nor_labels_have_a_say(groups, unit, random):
    failed, group = prompts(groups)
    order, labels = list(range(len(failed))), list(range(-5, len(groups) - 5))
    random.shuffle(order)
    random.shuffle(labels)
    shuffled = share_test(failed[order], np.array(labels)[group[order]], alpha=0.1, **unit)
    assert shuffled == share_test(failed, group, alpha=0.1, **unit)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=300), st.sampled_from([0.05, 0.3]))
def test_with_weight_one_a_group_has_one_vote(groups, alpha):
    """Where whole groups regress, E is that of one prompt a group, whatever their sizes."""
    whole = prompts([(size, size if failed else 0) for size, failed in groups])
    votes = prompts([(1, int(failed)) for _, failed in groups])
    sized, single = (share_test(*one, alpha=alpha, max_weight=1) for one in (whole, votes))
    assert sized.e_value == pytest.approx(single.e_value, rel=1e-12)
