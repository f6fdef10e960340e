"""The bound on refusals truly lost, against scipy's beta quantiles and by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta, binom

from holdfast.certification.truth import truth_bound
from holdfast.core.errors import ConfigError, DataError


def upper(k: int, n: int, level: float) -> float:
    return 1.0 if k == n else float(beta.ppf(1 - level, k + 1, n - k))


@pytest.mark.parametrize("openings", [1, 3])
@pytest.mark.parametrize(("lost", "groups", "wrong", "labelled"), [
    (0, 300, 0, 300), (4, 300, 1, 100), (30, 300, 20, 270), (300, 300, 0, 0), (0, 1, 0, 1), (10, 300, 290, 290),
])  # fmt: skip
def test_the_formula(lost, groups, wrong, labelled, openings):
    found = truth_bound(lost, groups, wrong, labelled, confidence=0.9, openings=openings)
    level = 0.1 / (2 * openings)
    by_rule, by_label = upper(lost, groups, level), upper(wrong, labelled, level) if labelled else 1.0
    assert found.upper_lost == pytest.approx(by_rule, rel=1e-8)
    assert found.upper_wrong == pytest.approx(by_label, rel=1e-8)
    assert found.upper == pytest.approx(by_rule + (1 - by_rule) * by_label, rel=1e-8)


def test_without_labels_nothing_is_known():
    assert truth_bound(0, 1000, 0, 0).upper == 1.0


def test_never_below_the_rule_alone_at_the_same_level():
    assert truth_bound(3, 300, 0, 297).upper > upper(3, 300, 0.025)


@pytest.mark.parametrize(("p_lost", "p_wrong"), [(0.02, 0.03), (0.0, 0.05), (0.05, 0.0), (0.2, 0.2)])
def test_it_covers_the_truth(p_lost, p_wrong):
    """20,000 draws: the true share exceeds the bound in at most 5 % of them (binomial p >= 0.001)."""
    draws, groups, labelled = 20_000, 300, 150
    draw = np.random.default_rng(11)
    lost = draw.binomial(groups, p_lost, size=draws)
    wrong = draw.binomial(np.minimum(labelled, groups - lost), p_wrong)
    truth = p_lost + (1 - p_lost) * p_wrong
    bounds: dict[tuple[int, int], float] = {}
    misses = 0
    for k, x in zip(lost.tolist(), wrong.tolist(), strict=True):
        if (k, x) not in bounds:
            bounds[k, x] = truth_bound(k, groups, x, min(labelled, groups - k)).upper
        misses += bounds[k, x] < truth
    assert binom.sf(misses - 1, draws, 0.05) >= 0.001


@pytest.mark.parametrize(
    "counts", [(2, 1, 0, 0), (0, 10, 3, 2), (5, 10, 0, 6), (0, 0, 0, 0)], ids=["lost", "wrong", "labelled", "none"]
)
def test_counts_that_cannot_be_are_refused(counts):
    with pytest.raises(DataError):
        truth_bound(*counts)


@pytest.mark.parametrize("given", [{"openings": 0}, {"confidence": 1.0}, {"confidence": 0.05}])
def test_settings_that_cannot_be_are_refused(given):
    with pytest.raises(ConfigError):
        truth_bound(0, 10, 0, 5, **given)
