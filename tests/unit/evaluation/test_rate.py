"""A share with its exact interval."""

from __future__ import annotations

import pytest
from scipy.stats import binomtest

from holdfast.certification.binomial import Rate
from holdfast.core.errors import DataError


@pytest.mark.parametrize(
    ("hits", "n"), [(0, 1), (1, 1), (0, 20), (20, 20), (7, 20), (1, 3000), (2999, 3000), (50, 100)]
)
def test_the_interval_is_scipys_clopper_pearson(hits, n):
    exact = binomtest(hits, n).proportion_ci(0.95, method="exact")
    assert Rate(hits, n).interval == pytest.approx((exact.low, exact.high), rel=1e-9, abs=1e-15)
    assert Rate(hits, n).value == hits / n


def test_json_has_every_figure():
    assert Rate(0, 4).as_json() == {"rate": 0.0, "hits": 0, "n": 4, "low": 0.0, "high": pytest.approx(1 - 0.025**0.25)}


@pytest.mark.parametrize(("hits", "n"), [(0, 0), (-1, 3), (4, 3)])
def test_impossible_counts_are_refused(hits, n):
    with pytest.raises(DataError, match=rf"a rate of {hits} in {n}, expected 0 <= hits <= n"):
        Rate(hits, n)
