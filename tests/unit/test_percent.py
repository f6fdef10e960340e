"""Percentages: what is rounded, in which direction, and what is not."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.certification.certificate import certify_counts
from holdfast.core.percent import exact_percent, percent, percent_up


@given(st.floats(0, 1))
def test_an_upper_bound_is_never_rounded_down(share):
    shown = float(percent_up(share).removesuffix(" %"))
    assert Decimal(percent_up(share).removesuffix(" %")) >= 100 * Decimal(repr(share))
    assert shown <= 100 * share * 1.01


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0, "0 %"), (1, "100 %"), (0.05, "5 %"), (0.02761, "2.77 %"), (0.0064123, "0.642 %"), (0.5, "50 %"),
     (0.99901, "100 %"), (float("nan"), "not a number")],
)  # fmt: skip
def test_an_upper_bound_has_three_significant_digits(share, shown):
    assert percent_up(share) == shown


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (0, "0 %"),
        (1, "100 %"),
        (0.05, "5 %"),
        (0.125, "12.5 %"),
        (0.0004, "0.04 %"),
        (1e-6, "< 0.01 %"),
        (0.9996, "99.96 %"),
        (0.999999, "> 99.99 %"),
        (0.123, "12.3 %"),
        (float("nan"), "not a number"),
    ],
)
def test_percent(share, shown):
    assert percent(share) == shown


@pytest.mark.parametrize(
    ("share", "shown"), [(0.05, "5 %"), (0.07, "7 %"), (0.0125, "1.25 %"), (0.9999, "99.99 %"), (1e-7, "0.00001 %")]
)
def test_a_chosen_share_is_not_rounded(share, shown):
    assert exact_percent(share) == shown


def test_no_statement_claims_more_than_was_tested():
    statement = certify_counts(0, 2000, alpha=0.01234, confidence=0.9999).statement
    assert statement.startswith("With 99.99 % confidence, at most 1.234 % of prompts")
