"""What the page shows of one run: words, rows and pictures, ready to be placed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from holdfast.core.percent import exact_percent, percent, percent_up
from holdfast.records.stored_evidence import Binding
from holdfast.report.behaviour import BehaviourView, behaviour_view
from holdfast.report.distribution import Range, Values, drawn_range, histogram, rate_chart, survival_chart
from holdfast.report.evidence import (
    QUANTILES,
    UNITS,
    CertificateFigures,
    Evidence,
    Figures,
    Limit,
    Missing,
    SafetyEvidence,
)
from holdfast.report.facts import Fact, facts, hashes
from holdfast.report.screening import screening_lines
from holdfast.report.svg import Size
from holdfast.report.training import EVENTS, course, training_chart
from holdfast.report.verdict import Verdict, claim, set_claim, set_verdict, verdict
from holdfast.report.wording import counted, number, setting
from holdfast.report.worst import WorstExamples, worst_examples

WIDE, NARROW = Size(704, 320), Size(336, 290, left=48, right=10)
WIDE_BARS, NARROW_BARS = Size(344, 210, left=36, right=10, top=22), Size(336, 210, left=36, right=10, top=22)
Pair = tuple[Markup, Markup]


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
class QuantileRow:
    """One line of the quantile table."""

    who: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class SetView:
    """One safety set."""

    evidence: SafetyEvidence
    name: str
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

    label: str
    anchor: str
    claim: str
    verdict: Verdict
    trained: bool
    named: bool
    sets: list[SetView]
    kept: BehaviourView | None
    screened: list[str]
    missing: tuple[Missing, ...]
    facts: list[Fact]
    hashes: list[Fact]
    config: str


def run_view(evidence: Evidence, *, label: str, anchor: str, text: bool) -> RunView:
    """Everything the page says about a folder."""
    return RunView(
        label=label,
        anchor=anchor,
        claim=claim(evidence),
        verdict=verdict(evidence),
        trained=evidence.trained,
        named=evidence.named,
        sets=[_set_view(evidence, one, text) for one in evidence.sets],
        kept=behaviour_view(evidence),
        screened=screening_lines(evidence),
        missing=evidence.missing,
        facts=facts(evidence),
        hashes=hashes(evidence),
        config=_config_text(evidence),
    )


def _config_text(evidence: Evidence) -> str:
    import yaml

    if evidence.config is None:
        return ""
    return yaml.safe_dump(evidence.config, sort_keys=False, allow_unicode=True, width=100)


def samples(one: SafetyEvidence) -> list[tuple[str, Values]]:
    """The roles that were measured example by example, held out first."""
    if one.table is None or one.limit is None:
        return []
    roles = [role for role in ("monitor", "audit", "constraint") if role in one.table.roles]
    found = [(role, one.table.of(role, one.limit.unit)) for role in roles]
    return [(role, values) for role, values in found if values.size]


def _set_view(evidence: Evidence, one: SafetyEvidence, text: bool) -> SetView:
    measured = samples(one)
    limit = one.limit
    window = drawn_range([values for _, values in measured], limit.tau) if measured and limit else None
    found = course(evidence.events, one.name) if evidence.events else None
    drawn = found is not None and found.constrained and limit is not None
    return SetView(
        evidence=one,
        name=one.name,
        claim=set_claim(one, unfinished=evidence.unfinished),
        verdict=set_verdict(one, unfinished=evidence.unfinished),
        rows=[*figure_rows(one)],
        rates=_rates(one, limit) if limit else None,
        survival=_survival(measured, limit, window) if limit and window else None,
        histograms=[_bars(role, values, limit, window) for role, values in measured] if limit and window else [],
        beyond=_beyond(measured, window) if window else "",
        by_role=[_quantile_row(f.role, {**f.quantiles, "cvar": f.cvar, "mean": f.mean}) for f in _ordered(one)],
        by_unit=[_quantile_row(unit, one.units[unit]) for unit in UNITS if unit in one.units],
        behaviour=_behaviour(one),
        training=(
            (training_chart(found, limit.alpha, 704, "wide"), training_chart(found, limit.alpha, 336, "narrow"))
            if drawn and found is not None and limit is not None
            else None
        ),
        events=[(name, n, EVENTS[name]) for name, n in found.counts.items()] if found else [],
        worst=worst_examples(one, text=text),
        certificate=_certificate(one),
    )


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
    return rate_chart(rows, limit, wide, "wide"), rate_chart(rows, limit, narrow, "narrow")


def _survival(measured: list[tuple[str, Values]], limit: Limit, window: Range) -> Pair:
    return (
        survival_chart(measured, limit, window, WIDE, "wide"),
        survival_chart(measured, limit, window, NARROW, "narrow"),
    )


def _bars(role: str, values: Values, limit: Limit, window: Range) -> Pair:
    return (
        histogram(role, values, limit, window, WIDE_BARS, "wide"),
        histogram(role, values, limit, window, NARROW_BARS, "narrow"),
    )


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
    return QuantileRow(who, tuple(number(values[k]) if k in values and values[k] == values[k] else "–" for k in keys))


def _behaviour(one: SafetyEvidence) -> list[Fact]:
    if one.behaviour is None:
        return []
    b = one.behaviour
    n = b.count("n")
    found = [
        Fact("judge", b.text("judge")),
        Fact("safe before", f"{b.count('safe_before'):,} of {n:,}"),
        Fact("safe after", f"{b.count('safe_after'):,} of {n:,}"),
        Fact("flips: safe before, unsafe after", f"{b.count('flips'):,} ({percent(b.number('flip_rate'))})"),
        Fact("95 % upper bound of the flip rate", percent_up(b.number("flip_upper"))),
        Fact("not scored", f"{b.count('unscored'):,}"),
    ]
    if "on_policy" in b:
        rises = b.inner("on_policy")
        what = f"replies whose judged probability of harm rose by more than {setting(rises.number('tau'))}"
        found.append(Fact(what, f"{rises.count('regressions'):,} (upper bound {percent_up(rises.number('upper'))})"))
    return found


WAYS = {
    "behaviour": "replies, refused or not",
    "harm": "replies, as a judge scores them",
    "kl": "divergences (a steering figure)",
    "likelihood": "likelihoods (a steering figure)",
    "log": "two evaluation logs",
}


def _limit_words(c: CertificateFigures) -> str:
    share = f"at most {exact_percent(c.limit.alpha)}"
    if c.by in ("behaviour", "log"):
        return f"{share} lost"
    return f"{share} beyond {setting(c.limit.tau)} {c.limit.words}"


def _certificate(one: SafetyEvidence) -> list[Fact]:
    c = one.certificate
    if c is None:
        return []
    kinds = {
        "fixed": "exact binomial test, over groups and over prompts",
        "finite_pool": "exact test for a known list (hypergeometric)",
        "sequential": "e-process over prompts in sequence",
        "per_category": "one exact test per category (Holm)",
        "strength": "largest safe adapter strength (Learn-then-Test)",
    }
    found = [
        Fact("verdict in the file", "certified" if c.certified else "not certified"),
        Fact("test", kinds.get(c.kind, c.kind)),
        Fact("compared", WAYS.get(c.by, c.by)),
        Fact("limit", _limit_words(c)),
        Fact(
            "regressions",
            f"{c.regressions:,} of {counted(c.n, 'prompt' if c.by_prompt else 'group')} "
            f"({counted(c.examples, 'prompt')})",
        ),
        Fact("upper bound", f"{percent_up(c.upper)} at {exact_percent(c.confidence)} confidence"),
        Fact("openings of the split", f"number {c.this_opening} of {c.declared} declared beforehand"),
        Fact("training data searched for these prompts", "yes, none found" if c.leakage_checked else "no"),
    ]
    if math.isfinite(c.certified_tau):
        found.insert(5, Fact("certified tau", f"the same test certifies any tau from {number(c.certified_tau)} on"))
    if c.strength is not None:
        found.insert(2, Fact("largest certified strength", setting(c.strength)))
    return found
