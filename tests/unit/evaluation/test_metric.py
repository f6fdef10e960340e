"""A metric holds finite numbers from at least one example; a share has the exact binomial interval."""

from __future__ import annotations

import json
import math

import pytest
from scipy.stats import binomtest

from holdfast.core.errors import DataError
from holdfast_lab.evaluation.harm import Metric


@pytest.mark.parametrize(("hits", "n"), [(0, 1), (3, 10), (700, 700), (41, 700)])
def test_a_share_has_the_clopper_pearson_interval(hits, n):
    found = Metric.share(hits, n)
    exact = binomtest(hits, n).proportion_ci(0.95, method="exact")
    assert found.value == hits / n
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high), rel=1e-8, abs=1e-12)
    assert found.low <= found.value <= found.high


def test_as_json_is_plain():
    assert json.loads(json.dumps(Metric(0.5, None, 0.75, 4).as_json())) == {
        "value": 0.5, "low": None, "high": 0.75, "n": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "low", "n"), [(math.nan, None, 3), (math.inf, None, 3), (0.5, math.nan, 3), (0.5, None, 0)]
)
def test_what_is_no_figure_is_refused(value, low, n):
    with pytest.raises(DataError, match="expected finite numbers from at least one example"):
        Metric(value, low, None, n)


@pytest.mark.parametrize(("hits", "n"), [(0, 0), (-1, 4), (5, 4)])
def test_an_impossible_share_is_refused(hits, n):
    with pytest.raises(DataError, match="expected 0 <= hits <= n"):
        Metric.share(hits, n)
