"""What the page shows of one run: words, rows and pictures, ready to be placed."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from markupsafe import Markup

from holdfast.core.percent import percent, percent_up
from holdfast.records.stored_evidence import Binding
from holdfast.reporting.behaviour import BehaviourView, behaviour_view
from holdfast.reporting.distribution import Range, Values, drawn_range, histogram, rate_chart, survival_chart
from holdfast.reporting.evidence import QUANTILES, ROLES, UNITS, Evidence, Figures, Limit, SafetyEvidence
from holdfast.reporting.facts import Fact, certificate_facts, facts, hashes, judged_replies, screening_lines
from holdfast.reporting.svg import Size
from holdfast.reporting.training import EVENTS, course, training_chart
from holdfast.reporting.verdict import Verdict, claim, set_claim, set_verdict, verdict
from holdfast.reporting.wording import counted, number
from holdfast.reporting.worst import WorstExamples, worst_examples

WIDE, NARROW = Size(704, 320), Size(336, 290, left=48, right=10)
WIDE_BARS, NARROW_BARS = Size(344, 210, left=36, right=10, top=22), Size(336, 210, left=36, right=10, top=22)
Pair = tuple[Markup, Markup]
QuantileRow = tuple[str, list[str]]  # of whom, and the figures as shown


@dataclass(frozen=True)
class FigureRow:
    who: str
    what: str
    count: str
    rate: str
    upper: str
    fits: str


@dataclass(frozen=True)
class SetView:
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
    written = "" if config is None else yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100)
    return RunView(
        evidence, label, anchor, claim(evidence), verdict(evidence),
        sets=[_set_view(evidence, one, text) for one in evidence.sets], kept=behaviour_view(evidence),
        screened=screening_lines(evidence), facts=facts(evidence), hashes=hashes(evidence), config=written,
    )  # fmt: skip


def samples(one: SafetyEvidence) -> list[tuple[str, Values]]:
    """The roles that were measured example by example, held out first."""
    if one.table is None or one.limit is None:
        return []
    roles = [role for role in ROLES if role in one.table.roles]
    found = [(role, one.table.of(role, one.limit.unit)) for role in roles]
    return [(role, values) for role, values in found if values.size]


def _set_view(evidence: Evidence, one: SafetyEvidence, text: bool) -> SetView:
    measured, limit = samples(one), one.limit
    window = drawn_range([values for _, values in measured], limit.tau) if measured and limit else None
    steps = course(evidence.events, one.name) if evidence.events else None
    survival, bars, training = None, [], None
    if limit and window:
        survival = _pair(partial(survival_chart, measured, limit, window), WIDE, NARROW)
        drawn = [partial(histogram, role, values, limit, window) for role, values in measured]
        bars = [_pair(draw, WIDE_BARS, NARROW_BARS) for draw in drawn]
    if limit and steps and steps.constrained:
        training = (training_chart(steps, limit.alpha, 704, "wide"), training_chart(steps, limit.alpha, 336, "narrow"))
    return SetView(
        one, set_claim(one, unfinished=evidence.unfinished), set_verdict(one, unfinished=evidence.unfinished),
        rows=figure_rows(one), rates=_rates(one, limit) if limit else None, survival=survival, histograms=bars,
        beyond=_beyond(measured, window) if window else "",
        by_role=[_quantile_row(f.role, {**f.quantiles, "cvar": f.cvar, "mean": f.mean}) for f in one.ordered],
        by_unit=[_quantile_row(unit, one.units[unit]) for unit in UNITS if unit in one.units],
        behaviour=judged_replies(one), training=training,
        events=[(name, n, EVENTS[name]) for name, n in steps.counts.items()] if steps else [],
        worst=worst_examples(one, text=text), certificate=certificate_facts(one),
    )  # fmt: skip


def _pair(draw: Callable[[Size, str], Markup], wide: Size, narrow: Size) -> Pair:
    return draw(wide, "wide"), draw(narrow, "narrow")


ROLE_WORDS = {"monitor": "held out, watched", "audit": "the examples given", "constraint": "open to training"}


def figure_rows(one: SafetyEvidence) -> list[FigureRow]:
    """Splits held out first, then what the other audit counted differently, then the certificate."""
    rows = [_figure_row(one, f, ROLE_WORDS.get(f.role, "")) for f in one.ordered]
    shown = {(f.role, f.n, f.violations) for f in one.figures}
    rows += [_figure_row(one, f, one.beside_origin) for f in one.beside if (f.role, f.n, f.violations) not in shown]
    if (certificate := one.certificate) is not None:
        c = certificate.record
        unchecked = c.certified and certificate.bound.binding is Binding.NOT_AT_HAND
        word = "certified" if certificate.stands else "not checked" if unchecked else "not certified"
        rate, upper = percent(c.regressions / c.n) if c.n else "none", percent_up(c.upper_bound)
        rows.append(FigureRow("certify", "untouched", f"{c.regressions:,} of {c.n:,}", rate, upper, word))
    return rows


def _figure_row(one: SafetyEvidence, f: Figures, what: str) -> FigureRow:
    fits = "within" if one.limit and f.rate <= one.limit.alpha else "over"
    return FigureRow(f.role, what, f"{f.violations:,} of {f.n:,}", percent(f.rate), percent_up(f.upper), fits)


def _rates(one: SafetyEvidence, limit: Limit) -> Pair | None:
    rows = one.ordered
    if one.certificate is not None and one.certificate.record.n and one.certificate.limit == limit:
        c = one.certificate.record
        rows.append(Figures("certify", c.n, c.regressions, c.regressions / c.n, min(c.upper_bound, 1.0), math.nan))
    if not rows:
        return None
    shape = {"height": 74 + 30 * len(rows), "top": 30, "bottom": 32}
    return _pair(
        partial(rate_chart, rows, limit), Size(704, left=92, right=16, **shape), Size(336, left=78, right=14, **shape)
    )


def _beyond(measured: list[tuple[str, Values]], window: Range) -> str:
    every = np.concatenate([values for _, values in measured])
    right, left, lost = (int(where.sum()) for where in (every > window.high, every < window.low, np.isnan(every)))
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
