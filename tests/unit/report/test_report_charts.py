"""The pictures say what the numbers say."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.constraint.event import Event
from holdfast.reporting.distribution import (
    MAX_POINTS,
    Range,
    bins,
    drawn_range,
    histogram,
    rate_chart,
    survival,
    survival_chart,
)
from holdfast.reporting.evidence import Figures, Limit
from holdfast.reporting.svg import Scale, Size, element, ticks
from holdfast.reporting.training import EVENTS, course, training_chart
from holdfast.training.loss_spikes import EVENT as SPIKE

LIMIT = Limit(tau=0.1, alpha=0.05, unit="nll_token")
VALUES = st.lists(st.floats(-1, 3, allow_nan=False), min_size=1, max_size=60)
SIZE = Size(704, 320)


def height(corners, x: float) -> float:
    """The drawn curve just right of x."""
    return next(y for (a, y), (b, _) in zip(reversed(corners[:-1]), reversed(corners), strict=False) if a <= x <= b)


@given(VALUES)
def test_the_curve_at_tau_is_the_violation_rate(values):
    d = np.array(values)
    corners = survival(d, drawn_range([d], 0.1), 0.1)
    assert height(corners, 0.1) == pytest.approx(np.mean(d > 0.1))
    heights = [y for _, y in corners]
    assert heights == sorted(heights, reverse=True)


def test_the_curve_of_many_examples_is_thinned_but_exact_at_tau():
    d = np.random.default_rng(0).normal(0, 0.06, 50_000)
    corners = survival(d, drawn_range([d], 0.1), 0.1)
    assert len(corners) <= 2 * MAX_POINTS + 4
    assert height(corners, 0.1) == np.mean(d > 0.1)


def test_nan_counts_as_beyond_everything():
    d = np.array([0.0, 0.0, np.nan, np.nan])
    assert survival(d, Range(-1, 1), 0.1)[-1][1] == 0.5


def points(markup: str, css: str) -> list[tuple[float, float]]:
    found = re.search(rf'<polyline class="{css}" points="([^"]*)"', markup).group(1)
    return [tuple(map(float, pair.split(","))) for pair in found.split()]  # type: ignore[misc]


@settings(max_examples=60)
@given(VALUES)
def test_the_drawn_curve_enters_the_tinted_area_exactly_when_the_limit_is_broken(values):
    d = np.array(values)
    chart = survival_chart([("monitor", d)], LIMIT, drawn_range([d], 0.1), SIZE, "wide")
    x, y, width, tall = (
        float(re.search(rf'<rect class="over"[^>]* {k}="([\d.]+)"', chart).group(1))
        for k in ("x", "y", "width", "height")
    )
    above = [a for a, b in points(chart, "curve monitor") if y <= b < y + tall - 0.2 and a <= x + width]
    rounding = 0.06  # points have one decimal
    if np.mean(d > 0.1) > 0.05:
        assert any(a >= x - rounding for a in above)
    else:
        assert not any(a > x + rounding for a in above)


@given(VALUES, st.sampled_from([18, 28]))
def test_no_bar_straddles_tau_and_none_is_lost(values, about):
    d = np.array([*values, np.nan])
    edges, counts = bins(d, 0.1, drawn_range([d], 0.1), about)
    assert sum(counts) == len(d)
    assert min(abs(edge - 0.1) for edge in edges) < 1e-12
    beyond = sum(count for left, count in zip(edges, counts, strict=False) if left >= 0.1 - 1e-12)
    assert beyond == int(np.sum(~(d <= 0.1)))
    assert len(counts) < 3 * about


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 10))
def test_ticks_are_few_round_and_inside(low, span, about):
    found = ticks(low, low + span, about)
    assert len(found) <= about + 2
    slack = 1e-9 * max(abs(low), span) + 1e-9
    assert all(low - slack <= tick <= low + span + slack for tick in found)


def test_markup_is_escaped_and_numbers_are_short():
    assert element("text", "<b>&", class_='"x', x=1.0) == '<text class="&#34;x" x="1">&lt;b&gt;&amp;</text>'
    assert Scale(0, 10, 0, 100)(99) == 100


def test_pictures_speak_to_those_who_cannot_see():
    d = np.array([0.0, 0.2])
    rows = [Figures("monitor", 2, 1, 0.5, 0.97, 0.2)]
    for chart in (
        survival_chart([("monitor", d)], LIMIT, drawn_range([d], 0.1), SIZE, "wide"),
        histogram("monitor", d, LIMIT, drawn_range([d], 0.1), SIZE, "wide"),
        rate_chart(rows, LIMIT, SIZE, "wide"),
    ):
        assert 'role="img"' in chart
        assert re.search(r"<title>.+</title><desc>.+</desc>", chart)
    assert "50 %" in rate_chart(rows, LIMIT, SIZE, "wide")
    assert "1 of 2" in histogram("monitor", d, LIMIT, drawn_range([d], 0.1), SIZE, "wide")


def rows(n: int, **changes):
    base = {"event": "active", "g": 0.1, "value": 0.05, "multiplier": 1.0, "violation_rate": 0.25}
    return [{"step": i + 1, **base, **changes} for i in range(n)]


def test_a_long_run_keeps_its_peak_and_stays_small():
    found = rows(20_000)
    found[7_777] |= {"g": 9.0}
    chart = training_chart(course(found, "safety"), 0.05, 704, "wide")
    assert len(chart) < 60_000
    top = min(y for _, y in points(chart, "curve value"))
    flat = max(y for _, y in points(chart, "curve value"))
    assert flat - top > 80


def test_a_gap_in_the_log_is_a_gap_in_the_curve():
    found = [*rows(3), *rows(2, g=None, event="nonfinite"), *rows(3)]
    for i, row in enumerate(found):
        row["step"] = i + 1
    chart = training_chart(course(found, "safety"), 0.05, 704, "wide")
    assert chart.count('<polyline class="curve value"') == 2
    assert chart.count('class="mark-nonfinite"') == 2


def test_steps_that_measured_nothing_leave_the_others_visible():
    """With `every` most steps have no violation rate, and two with one are never neighbours."""
    found = rows(12)
    for row in found:
        row["violation_rate"] = 0.25 if row["step"] % 4 == 1 else None
    chart = training_chart(course(found, "safety"), 0.05, 704, "wide")
    assert chart.count('<circle class="curve rate"') == 3


def test_a_panel_without_any_value_says_so_instead_of_showing_an_empty_scale():
    """`penalty` has no multiplier."""
    drawn = str(training_chart(course(rows(4, multiplier=None), "safety"), 0.05, 704, "wide"))
    assert "multiplier λ: not logged" in drawn
    assert "g: not logged" not in drawn
    unmeasured = str(training_chart(course(rows(4, violation_rate=None), "safety"), 0.05, 704, "wide"))
    assert unmeasured.count('class="limit"') == 1  # a frame with a limit and no curve would look like safety


def test_every_event_that_a_defense_can_log_is_explained():
    assert set(EVENTS) == {*(str(event) for event in Event), SPIKE}


@pytest.mark.parametrize("event", ["active", "capped", "nonfinite"])
def test_events_shared_by_filters_and_loss_terms_are_explained_for_both(event):
    assert "filter" in EVENTS[event]
    assert "term" in EVENTS[event] or "multiplier" in EVENTS[event]


def test_plain_fine_tuning_has_no_constraint_to_draw():
    assert not course([{"step": 1, "loss": 2.0}], "safety").constrained


@pytest.mark.parametrize("n", [1, 2])
def test_very_short_runs_are_drawn(n):
    assert "svg" in training_chart(course(rows(n), "safety"), 0.05, 336, "narrow")
