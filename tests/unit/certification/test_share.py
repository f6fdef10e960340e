"""Units, weights and sentences of a share's test, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.certification.assessment import assess
from holdfast.certification.binomial import p_value, upper_bound
from holdfast.certification.share import share_test
from holdfast.certification.terms import Rows, Terms, Words, require_enough, statement
from holdfast.core.errors import ConfigError, DataError, InfeasibleError

WORDS = Words("are answered", "is answered")
TEMPLATE = (np.arange(500) >= 100, np.minimum(np.arange(500), 100))  # 100 prompts hold, 400 of one group regress


def rows(failed, group, strength=np.nan) -> Rows:
    n = len(failed)
    degradation = np.where(failed, 1.0, 0.0)
    return Rows([f"{i:03d}" for i in range(n)], degradation, np.asarray(group), ["x"] * n, np.full(n, strength))


def terms(kind="fixed", **changes) -> Terms:
    return Terms(kind, 0.1, 0.05, 0.95, 1, changes.pop("pool", None), "nll_token", **changes)


def test_one_group_that_holds_most_prompts_cannot_hide():
    found = share_test(*TEMPLATE, alpha=0.05)
    assert (found.groups.n, found.groups.regressions) == (101, 1)
    assert found.groups.p_value <= 0.05 < found.rows.p_value
    assert (found.certified, found.rows.regressions / found.rows.n) == (False, 0.8)
    assert found.upper_bound == upper_bound(400, 500)


@pytest.mark.parametrize("weight", [1, 5, 50])
def test_no_weight_certifies_while_the_raw_share_exceeds_alpha(weight):
    """E alone would: of 301 groups one regresses, but it holds more than half of the prompts."""
    failed, group = np.arange(700) >= 300, np.minimum(np.arange(700), 300)
    found = share_test(failed, group, alpha=0.05, max_weight=weight)
    assert not found.certified
    assert found.upper_bound >= 400 / 700
    if weight == 1:
        assert found.e_value > 20


def test_rows_are_tested_alone_where_the_user_asserts_that_they_were_drawn():
    failed, group = np.arange(60) < 0, np.arange(60) // 6
    assert not share_test(failed, group, alpha=0.05).certified  # ten groups
    found = share_test(failed, group, alpha=0.05, drawn="rows")
    assert found.certified
    assert (found.unit, found.groups.p_value, found.groups.upper_bound) == (found.rows, None, None)
    assert found.rows.p_value == p_value(0, 60, 0.05)


def test_sentences():
    failed, group = np.arange(300) < 2, np.arange(300) // 2
    assert statement(share_test(failed, group, alpha=0.05), WORDS) == (
        "With 95 % confidence, at most 5 % of groups of near-duplicate prompts from this source have a prompt that is "
        "answered (1 of 150 groups did, 2 of 300 prompts; upper bound 3.13 %)."
    )
    assert statement(share_test(failed, group, alpha=0.05, drawn="rows", parts=2), WORDS) == (
        "With 95 % confidence over 2 openings, at most 5 % of prompts from this source, drawn one by one as its user "
        "asserts, are answered (2 of 300 did; upper bound 2.39 %)."
    )
    assert statement(share_test(failed, group, alpha=0.05, max_weight=2), WORDS) == (
        "With 95 % confidence, at most 5 % of prompts from this source, where a group of near-duplicates weighs at "
        "most 2, are answered (2 of 300 prompts did, in 1 of 150 groups; upper bound 4.43 %)."
    )
    assert statement(share_test(~failed, group, alpha=0.05)) == (
        "Not certified: that at most 5 % of groups of near-duplicate prompts from this source have a prompt that "
        "regresses is not shown (149 of 150 groups did, 298 of 300 prompts; upper bound 100 %)."
    )


def test_every_kind_says_what_it_tests():
    failed, group = np.arange(200) < 0, np.arange(200)
    said = {
        ("fixed", "groups"): "of groups of near-duplicate prompts from this source have a prompt that degrades",
        ("sequential", "groups"): "of groups of near-duplicate prompts from this source have a prompt that degrades",
        ("per_category", "groups"): "of groups of near-duplicate prompts from this source in each of 1 categories have",
        ("fixed", "rows"): "of prompts from this source, drawn one by one as its user asserts, degrade",
        ("sequential", "rows"): "of prompts from this source, drawn one by one as its user asserts, degrade",
        ("per_category", "rows"): "of prompts from this source in each of 1 categories, drawn one by one as its user",
    }
    for (kind, drawn), words in said.items():
        found = assess(rows(failed, group), terms(kind, drawn=drawn))
        assert f"at most 5 % {words}" in found["statement"]
        assert (found["certified"], found["drawn"], found["max_weight"]) == (True, drawn, None)
    pooled = assess(rows(failed, group), terms("finite_pool", pool=900))["statement"]
    assert "at most 5 % of the 900 listed prompts degrade by more than 0.1 (nll_token) (0 of 200 drawn" in pooled


def test_blocks_of_the_record():
    found = assess(rows(np.arange(300) < 2, np.arange(300) // 2), terms(max_weight=2))
    assert found["groups"] == {"n": 150, "regressions": 1, "p_value": None, "upper_bound": None}
    assert found["rows"] == {"n": 300, "regressions": 2, "p_value": None, "upper_bound": None}
    assert (found["n"], found["regressions"], found["max_weight"]) == (150, 1, 2)
    assert found["p_value"] == pytest.approx(1 / found["e_value"])
    pooled = assess(rows(np.arange(300) < 2, np.arange(300) // 2), terms("finite_pool", pool=900))
    assert pooled["groups"]["p_value"] is None
    assert pooled["rows"]["p_value"] == pooled["p_value"]


def test_a_sequence_may_hold_near_duplicates_only_where_rows_were_drawn():
    table = rows(np.arange(120) < 0, np.arange(120) // 2)
    assert assess(table, terms("sequential", drawn="rows"))["certified"]


def test_categories_take_both_tests():
    """In category b one group of many prompts regresses: over groups alone it would pass."""
    failed = np.concatenate([np.zeros(110, bool), np.zeros(160, bool), np.ones(300, bool)])
    group = np.concatenate([np.arange(270), np.full(300, 270)])
    table = rows(failed, group)
    table = Rows(table.ids, table.degradation, table.cluster, ["a"] * 110 + ["b"] * 460, table.strength)
    found = assess(table, terms("per_category"))
    assert {name: one["certified"] for name, one in found["categories"].items()} == {"a": True, "b": False}
    assert found["categories"]["b"]["groups"]["p_value"] <= 0.01
    assert found["categories"]["b"]["upper_bound"] > 0.5


def test_the_certified_tau_is_that_of_the_whole_test():
    """Of 200 groups of three some regress as a whole: the rows decide with few large ones, the groups with single."""
    random = np.random.default_rng(0)
    group = np.repeat(np.arange(200), 3)
    for weight in (None, 2):
        degradation = np.repeat(random.random(200), 3) * random.random(600)
        table = Rows([str(i) for i in range(600)], degradation, group, [None] * 600, np.full(600, np.nan))

        def verdict(tau, table=table, weight=weight):
            return assess(table, Terms("fixed", tau, 0.05, 0.95, 1, None, "nll_token", max_weight=weight))

        tau = verdict(0.5)["certified_tau"]
        assert verdict(tau)["certified"]
        assert not verdict(np.nextafter(tau, 0))["certified"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drawn": "prompts"}, "drawn = 'prompts', expected groups or rows"),
        ({"max_weight": 0}, "max_weight = 0, expected a whole number >= 1"),
        ({"max_weight": 2.0}, "max_weight = 2.0"),
        ({"max_weight": True}, "max_weight = True"),
        ({"drawn": "rows", "max_weight": 3}, "have no groups to weigh"),
    ],
)
def test_units_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        share_test([False] * 60, range(60), alpha=0.05, **options)
    with pytest.raises(ConfigError, match=message):
        terms(**options)


@pytest.mark.parametrize("kind", ["finite_pool", "sequential"])
def test_a_weight_is_refused_where_there_is_nothing_to_weigh(kind):
    with pytest.raises(ConfigError, match=f"a {kind} certificate with max_weight 3"):
        terms(kind, max_weight=3, pool=90 if kind == "finite_pool" else None)


@pytest.mark.parametrize(
    ("failed", "group"), [([], []), ([True], [1, 2]), ([[True]], [[1]]), ([0.0, 1.0], [0, 1]), ([0, 1], [0, 1])]
)
def test_columns_that_do_not_fit_are_refused(failed, group):
    with pytest.raises(DataError, match="outcomes"):
        share_test(failed, group, alpha=0.05)


def test_too_few_groups_are_refused_in_their_unit():
    with pytest.raises(InfeasibleError, match="58 groups of near-duplicate prompts cannot certify"):
        require_enough(terms(), 58)
    with pytest.raises(InfeasibleError, match="58 prompts cannot certify"):
        require_enough(terms(drawn="rows"), 58)
    require_enough(terms(max_weight=5), 145, sizes=[3] * 145)
    require_enough(terms(max_weight=5), 1)  # sizes are not known yet
    with pytest.raises(InfeasibleError, match=r"144 groups of these sizes cannot certify .* a largest weight of 5"):
        require_enough(terms(max_weight=5), 144, sizes=[3] * 144)
