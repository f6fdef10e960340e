"""What the page shows of one run: words, rows and pictures, ready to be placed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from markupsafe import Markup

from holdfast.core.percent import percent, percent_up
from holdfast.records.stored_evidence import Binding
from holdfast.report.behaviour import BehaviourView, behaviour_view
from holdfast.report.distribution import Range, Values, drawn_range, histogram, rate_chart, survival_chart
from holdfast.report.evidence import QUANTILES, UNITS, Evidence, Figures, Limit, SafetyEvidence
from holdfast.report.facts import Fact, certificate_facts, facts, hashes, judged_replies
from holdfast.report.screening import screening_lines
from holdfast.report.svg import Size
from holdfast.report.training import EVENTS, course, training_chart
from holdfast.report.verdict import Verdict, claim, set_claim, set_verdict, verdict
from holdfast.report.wording import counted, number
from holdfast.report.worst import WorstExamples, worst_examples

WIDE, NARROW = Size(704, 320), Size(336, 290, left=48, right=10)
WIDE_BARS, NARROW_BARS = Size(344, 210, left=36, right=10, top=22), Size(336, 210, left=36, right=10, top=22)
Pair = tuple[Markup, Markup]
QuantileRow = tuple[str, list[str]]  # of whom, and the figures as shown


@dataclass(frozen=True)
class FigureRow:
    """One line of the figures that matter."""

    who: str
    what: str
    count: str
    rate: str
    upper: str
    fits: str


@dataclass(frozen=True)
class SetView:
    """One safety set."""

    evidence: SafetyEvidence
    claim: str
    verdict: Verdict
    rows: list[FigureRow]
    rates: Pair | None
    survival: Pair | None
    histograms: list[Pair]
    beyond: str
    by_role: list[QuantileRow]
    by_unit: list[QuantileRow]
    behaviour: list[Fact]
    training: Pair | None
    events: list[tuple[str, int, str]]
    worst: WorstExamples
    certificate: list[Fact]


@dataclass(frozen=True)
class RunView:
    """One folder."""

    evidence: Evidence
    label: str
    anchor: str
    claim: str
    verdict: Verdict
    sets: list[SetView]
    kept: BehaviourView | None
    screened: list[str]
    facts: list[Fact]
    hashes: list[Fact]
    config: str


def run_view(evidence: Evidence, *, label: str, anchor: str, text: bool) -> RunView:
    """Everything the page says about a folder."""
    import yaml

    config = evidence.config
    return RunView(
        evidence=evidence,
        label=label,
        anchor=anchor,
        claim=claim(evidence),
        verdict=verdict(evidence),
        sets=[_set_view(evidence, one, text) for one in evidence.sets],
        kept=behaviour_view(evidence),
        screened=screening_lines(evidence),
        facts=facts(evidence),
        hashes=hashes(evidence),
        config="" if config is None else yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100),
    )


def samples(one: SafetyEvidence) -> list[tuple[str, Values]]:
    """The roles that were measured example by example, held out first."""
    if one.table is None or one.limit is None:
        return []
    roles = [role for role in ("monitor", "audit", "constraint") if role in one.table.roles]
    found = [(role, one.table.of(role, one.limit.unit)) for role in roles]
    return [(role, values) for role, values in found if values.size]


def _set_view(evidence: Evidence, one: SafetyEvidence, text: bool) -> SetView:
    measured, limit = samples(one), one.limit
    window = drawn_range([values for _, values in measured], limit.tau) if measured and limit else None
    steps = course(evidence.events, one.name) if evidence.events else None
    survival, bars, training = None, [], None
    if limit and window:
        survival = _pair(partial(survival_chart, measured, limit, window), WIDE, NARROW)
        for role, values in measured:
            draw = partial(histogram, role, values, limit, window)
            bars.append(_pair(draw, WIDE_BARS, NARROW_BARS))
    if limit and steps and steps.constrained:
        training = (training_chart(steps, limit.alpha, 704, "wide"), training_chart(steps, limit.alpha, 336, "narrow"))
    return SetView(
        evidence=one,
        claim=set_claim(one, unfinished=evidence.unfinished),
        verdict=set_verdict(one, unfinished=evidence.unfinished),
        rows=figure_rows(one),
        rates=_rates(one, limit) if limit else None,
        survival=survival,
        histograms=bars,
        beyond=_beyond(measured, window) if window else "",
        by_role=[_quantile_row(f.role, {**f.quantiles, "cvar": f.cvar, "mean": f.mean}) for f in _ordered(one)],
        by_unit=[_quantile_row(unit, one.units[unit]) for unit in UNITS if unit in one.units],
        behaviour=judged_replies(one),
        training=training,
        events=[(name, n, EVENTS[name]) for name, n in steps.counts.items()] if steps else [],
        worst=worst_examples(one, text=text),
        certificate=certificate_facts(one),
    )


def _pair(draw: Callable[[Size, str], Markup], wide: Size, narrow: Size) -> Pair:
    return draw(wide, "wide"), draw(narrow, "narrow")


def _ordered(one: SafetyEvidence) -> list[Figures]:
    order = {"monitor": 0, "audit": 1, "constraint": 2}
    return sorted(one.figures, key=lambda f: order.get(f.role, 3))


ROLE_WORDS = {"monitor": "held out, watched", "audit": "the examples given", "constraint": "open to training"}


def figure_rows(one: SafetyEvidence) -> list[FigureRow]:
    """Splits held out first, then what the other audit counted differently, then the certificate."""
    rows = [_figure_row(one, f, ROLE_WORDS.get(f.role, "")) for f in _ordered(one)]
    shown = {(f.role, f.n, f.violations) for f in one.figures}
    rows += [_figure_row(one, f, one.beside_origin) for f in one.beside if (f.role, f.n, f.violations) not in shown]
    c = one.certificate
    if c is not None:
        rate = percent(c.regressions / c.n) if c.n else "none"
        unchecked = c.certified and c.bound.binding is Binding.NOT_AT_HAND
        verdict_word = "certified" if c.stands else "not checked" if unchecked else "not certified"
        rows.append(
            FigureRow("certify", "untouched", f"{c.regressions:,} of {c.n:,}", rate, percent_up(c.upper), verdict_word)
        )
    return rows


def _figure_row(one: SafetyEvidence, f: Figures, what: str) -> FigureRow:
    fits = "within" if one.limit and f.rate <= one.limit.alpha else "over"
    return FigureRow(f.role, what, f"{f.violations:,} of {f.n:,}", percent(f.rate), percent_up(f.upper), fits)


def _rates(one: SafetyEvidence, limit: Limit) -> Pair | None:
    rows = _ordered(one)
    c = one.certificate
    if c is not None and c.n and math.isfinite(c.upper) and c.limit == limit:
        rows.append(Figures("certify", c.n, c.regressions, c.regressions / c.n, min(c.upper, 1.0), math.nan))
    if not rows:
        return None
    height = 74 + 30 * len(rows)
    wide = Size(704, height, left=92, right=16, top=30, bottom=32)
    narrow = Size(336, height, left=78, right=14, top=30, bottom=32)
    return _pair(partial(rate_chart, rows, limit), wide, narrow)


def _beyond(measured: list[tuple[str, Values]], window: Range) -> str:
    """What the picture cuts off."""
    every = np.concatenate([values for _, values in measured])
    right, left = int(np.sum(every > window.high)), int(np.sum(every < window.low))
    lost = int(np.isnan(every).sum())
    parts = []
    if right:
        parts.append(f"{counted(right, 'example')} further right (largest D {number(float(np.nanmax(every)))})")
    if left:
        parts.append(f"{counted(left, 'example')} further left (smallest D {number(float(np.nanmin(every)))})")
    if lost:
        parts.append(f"{counted(lost, 'example')} without a finite D, counted as violations")
    return f"Not drawn: {'; '.join(parts)}." if parts else ""


def _quantile_row(who: str, values: dict[str, float]) -> QuantileRow:
    keys = (*QUANTILES, "cvar", "mean")
    return who, [number(values[k]) if k in values and values[k] == values[k] else "–" for k in keys]
