"""From a table to the verdict: units, NaN, and tables that do not fit their kind."""

from __future__ import annotations

import math

import numpy as np
import pytest

from holdfast.certification.assessment import assess
from holdfast.certification.binomial import p_value, upper_bound
from holdfast.certification.terms import Rows, Terms, require_enough
from holdfast.core.errors import CheckpointError, InfeasibleError


def terms(kind: str = "fixed", **changes) -> Terms:
    values = {"tau": 0.1, "alpha": 0.2, "confidence": 0.95, "openings": 1, "pool": None, "unit": "nll_token"} | changes
    return Terms(kind=kind, **values)


def rows(degradation, *, cluster=None, category=None, strength=math.nan) -> Rows:
    n = len(degradation)
    return Rows(
        ids=[f"{i:04d}" for i in range(n)],
        degradation=np.array(degradation, dtype=float),
        cluster=np.arange(n) if cluster is None else np.array(cluster),
        category=[None] * n if category is None else category,
        strength=np.full(n, strength),
    )


def test_a_group_regresses_with_any_of_its_prompts():
    found = assess(rows([0.0] * 29 + [0.5, 0.0, math.nan], cluster=[*range(20)] + [3] * 9 + [3, 4, 4]), terms())
    assert (found["n"], found["examples"], found["regressions"]) == (20, 32, 2)
    assert found["groups"] == {
        "n": 20, "regressions": 2, "p_value": p_value(2, 20, 0.2), "upper_bound": upper_bound(2, 20)
    }  # fmt: skip
    assert found["rows"] == {
        "n": 32, "regressions": 2, "p_value": p_value(2, 32, 0.2), "upper_bound": upper_bound(2, 32)
    }  # fmt: skip
    assert found["p_value"] == p_value(2, 20, 0.2) > p_value(2, 32, 0.2)


def test_at_tau_exactly_nothing_regresses():
    assert assess(rows([0.1] * 20), terms())["regressions"] == 0
    assert assess(rows([np.nextafter(0.1, 1)] * 20), terms())["regressions"] == 20


def test_a_sequence_that_turned_bad_is_not_certified_and_says_why():
    good = assess(rows([0.0] * 40), terms("sequential"))
    turned = assess(rows([0.0] * 40 + [0.5] * 40), terms("sequential"))
    assert good["certified"]
    assert not turned["certified"]
    assert turned["sequential"]["certified_at"] is not None
    assert turned["upper_bound"] > 0.5
    assert "was shown after 20 prompts, but more than that do by now (40 of 80 groups did" in turned["statement"]
    back = assess(rows([0.0] * 40 + [0.5] * 40 + [0.0] * 120), terms("sequential"))
    assert back["certified"], "20 % is not more than 20 %"


def test_the_bound_of_a_strength_allows_for_the_choice_of_it():
    passed = [rows([0.0] * (59 - i % 2) + [0.5] * (1 + i % 2), strength=(i + 1) / 10) for i in range(10)]
    every = assess(Rows.joined(passed), terms("strength"))
    assert every["strength"]["chosen"] == 1.0
    assert every["upper_bound"] == upper_bound(2, 60, 0.95), "the largest of all strengths"
    stopped = assess(Rows.joined([*passed[:3], rows([0.5] * 60, strength=0.4)]), terms("strength"))
    assert (stopped["strength"]["chosen"], stopped["upper_bound"]) == (0.3, 0.2)
    none = assess(rows([0.5] * 30 + [0.0] * 30, strength=0.1), terms("strength"))
    assert none["upper_bound"] == upper_bound(30, 60, 0.95)


def test_the_certified_tau_is_where_the_verdict_turns():
    values = np.linspace(0, 1, 60)
    tau = assess(rows(values), terms(tau=0.5))["certified_tau"]
    assert assess(rows(values), terms(tau=tau))["certified"]
    assert not assess(rows(values), terms(tau=np.nextafter(tau, 0)))["certified"]
    pooled = terms("finite_pool", pool=90, tau=0.5)
    tau = assess(rows(values), pooled)["certified_tau"]
    assert assess(rows(values), terms("finite_pool", pool=90, tau=tau))["certified"]
    assert not assess(rows(values), terms("finite_pool", pool=90, tau=np.nextafter(tau, 0)))["certified"]


def test_a_pool_counts_prompts_not_groups():
    found = assess(rows([0.0] * 20, cluster=[0] * 20), terms("finite_pool", pool=20))
    assert (found["n"], found["upper_bound"], found["certified"]) == (20, 0.0, True)


def test_a_group_in_two_categories_counts_in_both():
    category = ["a"] * 20 + ["b"] * 20
    cluster = [*range(20), 0, *range(21, 40)]
    found = assess(rows([0.0] * 20 + [0.5] + [0.0] * 19, cluster=cluster, category=category), terms("per_category"))
    assert {name: (entry["n"], entry["regressions"]) for name, entry in found["categories"].items()} == {
        "a": (20, 0),
        "b": (20, 1),
    }
    assert (found["n"], found["regressions"], found["certified"]) == (39, 1, False)


def test_openings_lower_the_level():
    assert assess(rows([0.0] * 14), terms())["certified"]
    assert assess(rows([0.0] * 17), terms(openings=2))["level"] == 0.025
    with pytest.raises(InfeasibleError, match="17 are needed"):
        require_enough(terms(openings=2), 16)
    require_enough(terms(openings=2), 17)
    require_enough(terms("sequential"), 1)


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        (rows([]), "fixed"),
        (rows([0.0] * 20, strength=0.1), "fixed"),
        (rows([0.0] * 20), "strength"),
        (rows([0.0] * 20, strength=0.2), "strength"),
        (rows([0.0] * 20, strength=0.1), "strength"),
        (Rows.joined([rows([9.0] * 20, strength=0.1), rows([9.0] * 20, strength=0.2)]), "strength"),
        (rows([0.0] * 20, cluster=[0] * 20), "sequential"),
        (rows([0.0] * 20), "per_category"),
        (rows([0.0] * 20), "finite_pool"),
    ],
)
def test_a_table_of_another_kind_is_refused(table, kind):
    """Missing, skipped or surplus strengths among them: a search that went past a failure proves nothing."""
    with pytest.raises(CheckpointError, match="does not fit it"):
        assess(table, terms(kind))
