"""The certificate's verdict, its words, and what it refuses."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import holdfast as hf
from holdfast.certification import binomial
from holdfast.certification.certificate import certify_counts
from holdfast.certification.share import certify_categories
from holdfast.core.errors import ConfigError, DataError, InfeasibleError


def test_58_prompts_are_refused_with_the_number_needed():
    with pytest.raises(InfeasibleError) as refused:
        certify_counts(0, 58)
    assert refused.value.exit_code == 4
    assert refused.value.what == (
        "58 prompts cannot certify alpha = 0.05 at confidence 0.95, even with no regression: 59 are needed"
    )
    assert "at least 59 prompts" in refused.value.remedy
    assert certify_counts(0, 59).certified


def test_a_list_is_not_certified_while_more_than_alpha_of_the_sample_regress():
    """19 of 20 with one bad: at most one of the list is bad, 5 % of it, with 90 % confidence; but 1/19 > 5 %."""
    found = certify_counts(1, 19, 0.05, 0.9, pool=20)
    assert (found.p_value, found.certified) == (1.0, False)
    assert found.upper_bound == 0.05263157895
    assert certify_counts(1, 20, 0.05, 0.9, pool=20).certified


def test_openings_share_delta():
    found = certify_counts(0, 72, openings=2)
    assert found.level == 0.025
    assert found.certified
    with pytest.raises(InfeasibleError, match="shared among 2 tests, even with no regression: 72 are needed"):
        certify_counts(0, 71, openings=2)
    assert found.upper_bound == binomial.upper_bound(0, 72, parts=2) > binomial.upper_bound(0, 72)
    assert certify_counts(4, 200).certified
    assert not certify_counts(4, 200, openings=2).certified


def test_the_verdict_follows_the_level():
    assert certify_counts(4, 200).certified
    assert not certify_counts(5, 200).certified
    assert isinstance(certify_counts(4, 200), hf.Certificate)


def test_statements():
    assert certify_counts(3, 200).statement == (
        "With 95 % confidence, at most 5 % of prompts from this source, drawn one by one as its user asserts, regress "
        "(3 of 200 did; upper bound 3.84 %)."
    )
    assert certify_counts(13, 200).sentence("degrade by more than 0.1 nats") == (
        "Not certified: that at most 5 % of prompts from this source, drawn one by one as its user asserts, "
        "degrade by more than 0.1 nats is not shown "
        "(13 of 200 did; upper bound 10.2 %)."
    )
    assert certify_counts(0, 100, openings=2).statement.startswith("With 95 % confidence over 2 openings, at most 5 %")
    assert certify_counts(1, 60, pool=100).statement == (
        "With 95 % confidence, at most 5 % of the 100 listed prompts regress "
        "(1 of 60 drawn from the list at random did; upper bound 5 %)."
    )
    assert certify_counts(1, 20, pool=20).statement == (
        "At most 5 % of the 20 listed prompts regress: all were measured, 1 of 20 did."
    )
    assert certify_counts(2, 20, pool=20).statement == (
        "More than 5 % of the 20 listed prompts regress: all were measured, 2 of 20 did."
    )


def test_a_printed_bound_is_never_below_the_bound():
    found = certify_counts(5, 200)  # 5.18 %
    near = dataclasses.replace(found, upper_bound=0.0500001)
    assert "upper bound 5.01 %" in near.statement


def test_a_list_is_certified_by_its_own_test():
    found = certify_counts(0, 45, pool=100)
    assert (found.test, found.pool, found.certified) == ("hypergeometric", 100, True)
    assert found.upper_bound <= 0.05
    with pytest.raises(InfeasibleError, match="45 prompts cannot certify"):
        certify_counts(0, 45)  # an open source needs more
    with pytest.raises(DataError, match="n = 45 prompts from a list of 44"):
        certify_counts(0, 45, pool=44)


def test_a_certificate_is_json_and_frozen():
    found = certify_counts(3, 200)
    stored = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert stored == {
        "alpha": 0.05,
        "confidence": 0.95,
        "n": 200,
        "regressions": 3,
        "test": "clopper-pearson",
        "level": 0.05,
        "p_value": found.p_value,
        "upper_bound": found.upper_bound,
        "openings": 1,
        "pool": None,
        "certified": True,
        "statement": found.statement,
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.p_value = 0.0  # type: ignore[misc]


@pytest.mark.parametrize("openings", [0, -1, 1.5, True])
def test_openings_must_be_a_count(openings):
    with pytest.raises(ConfigError, match="openings"):
        certify_counts(0, 100, openings=openings)


def measured(**counts):
    """Categories of groups of one prompt, by name: (regressions, n)."""
    return {name: (np.arange(n) < k, np.arange(n)) for name, (k, n) in counts.items()}


def test_categories_are_corrected_by_holm():
    """p is near 0.001, 0.002 and 0.037; alone each certifies, together too, since the last gets all of delta."""
    found = certify_categories(measured(a=(1, 180), b=(0, 123), c=(1, 100)), 0.05, 0.95)
    assert list(found) == ["a", "b", "c"]
    assert all(v.certified for v in found.values())
    assert found["b"].upper_bound == binomial.upper_bound(0, 123, parts=3)
    assert found["c"].upper_bound == 0.05 < binomial.upper_bound(1, 100, parts=3)
    assert found["c"].adjusted_p == found["c"].p_value > 0.05 / 3
    assert found["b"].adjusted_p == pytest.approx(2 * found["b"].p_value)
    assert found["a"].adjusted_p == pytest.approx(3 * found["a"].p_value)


def test_a_failed_category_keeps_its_fellows():
    found = certify_categories(measured(good=(0, 300), bad=(30, 200), small=(0, 20), tiny=(0, 1)))
    assert [name for name, verdict in found.items() if verdict.certified] == ["good"]
    assert found["good"].upper_bound == 0.05
    assert found["bad"].upper_bound == binomial.upper_bound(30, 200, parts=3)  # three failed together
    assert found["small"].needed == found["tiny"].needed == binomial.fewest_prompts(0.05, parts=4) == 86
    assert found["bad"].needed is None
    assert found["tiny"].upper_bound > 0.9
    assert json.dumps(dataclasses.asdict(found["bad"]))


def test_all_categories_too_small_is_refused_with_the_number_needed():
    with pytest.raises(InfeasibleError, match=r"109 groups in a category cannot certify .* 110 are needed"):
        certify_categories(measured(**{f"category {i}": (0, 109) for i in range(14)}))
    certify_categories(measured(**{f"category {i}": (0, 110) for i in range(14)}))


def test_categories_are_checked():
    with pytest.raises(DataError, match="no categories"):
        certify_categories({})
    with pytest.raises(DataError, match=r"outcomes of shape \(0,\)"):
        certify_categories({"a": ([], []), "b": ([False] * 100, range(100))})
