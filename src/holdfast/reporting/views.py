"""What the page shows of one run: words, rows, pictures and the worst examples, ready to be placed."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from holdfast.core.errors import HoldfastError
from holdfast.core.files import read_plain_file
from holdfast.core.percent import percent, percent_up
from holdfast.core.units import UNITS
from holdfast.data.examples import Example, Turns, make_example, said
from holdfast.data.sources import read_examples
from holdfast.records.audit_folder import degradations
from holdfast.records.stored_evidence import Binding
from holdfast.reporting.behaviour import TONES, BehaviourView, behaviour_view
from holdfast.reporting.distribution import Range, Values, drawn_range, histogram, rate_chart, survival_chart
from holdfast.reporting.evidence import QUANTILES, ROLES, Evidence, Figures, Limit, SafetyEvidence, Source
from holdfast.reporting.facts import Fact, certificate_facts, cost_facts, facts, hashes, judged_replies, screening_lines
from holdfast.reporting.svg import Size
from holdfast.reporting.training import EVENTS, Course, course, training_chart
from holdfast.reporting.verdict import Verdict, claim, headline, set_claim, set_verdict, verdict
from holdfast.reporting.wording import counted, number

WIDE, NARROW = Size(704, 320), Size(336, 290, left=48, right=10)
WIDE_BARS, NARROW_BARS = Size(344, 210, left=36, right=10, top=22), Size(336, 210, left=36, right=10, top=22)
Pair = tuple[Markup, Markup]
WORST_SHOWN = 10
QuantileRow = tuple[str, list[str]]  # of whom, and the figures as shown


@dataclass(frozen=True)
class Worst:
    """One example; prompt and reply are None where its text is not shown."""

    id: str
    category: str
    degradation: float
    tokens: int
    violated: bool
    prompt: str | None = None
    reply: str | None = None


@dataclass(frozen=True)
class WorstExamples:
    """The examples with the largest D, worst first; `note` says what is missing and why."""

    role: str
    rows: tuple[Worst, ...]
    note: str

    @property
    def has_text(self) -> bool:
        return any(row.prompt is not None for row in self.rows)


@dataclass(frozen=True)
class FigureRow:
    who: str
    what: str
    count: str
    rate: str
    upper: str
    fits: str
    css: str


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
    no_training: str  # why there is no picture of it
    events: list[tuple[str, int, str]]
    worst: WorstExamples
    certificate: list[Fact]


@dataclass(frozen=True)
class RunView:
    evidence: Evidence
    label: str
    anchor: str
    headline: str
    claim: str
    verdict: Verdict
    sets: list[SetView]
    kept: BehaviourView | None
    screened: list[str]
    facts: list[Fact]
    cost: list[Fact]
    hashes: list[Fact]
    config: str

    def to_json(self) -> dict[str, str]:
        verdict = self.verdict.standing.name.lower()
        return {"behaviour": self.headline, "verdict": verdict, "claim": self.claim}


def run_view(evidence: Evidence, *, label: str, anchor: str, text: bool) -> RunView:
    """Everything the page says about a folder."""
    import yaml

    config = evidence.config
    written = "" if config is None else yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100)
    return RunView(
        evidence, label, anchor, headline(evidence), claim(evidence), verdict(evidence),
        sets=[_set_view(evidence, one, text) for one in evidence.sets], kept=behaviour_view(evidence),
        screened=screening_lines(evidence), facts=facts(evidence), cost=cost_facts(evidence), hashes=hashes(evidence),
        config=written,
    )  # fmt: skip


def samples(one: SafetyEvidence) -> list[tuple[str, Values]]:
    """The roles that were measured example by example, held out first."""
    if one.table is None or one.limit is None:
        return []
    found = [(role, degradations(one.table, one.limit.unit, role)) for role in ROLES]
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
    if limit and steps and steps.constrained and len(steps.steps) > 1:
        training = (training_chart(steps, limit.alpha, 704, "wide"), training_chart(steps, limit.alpha, 336, "narrow"))
    return SetView(
        one, set_claim(one, unfinished=evidence.unfinished), set_verdict(one, unfinished=evidence.unfinished),
        rows=figure_rows(one), rates=_rates(one, limit) if limit else None, survival=survival, histograms=bars,
        beyond=_beyond(measured, window) if window else "",
        by_role=[_quantile_row(f.role, {**f.quantiles, "cvar": f.cvar, "mean": f.mean}) for f in one.ordered],
        by_unit=[_quantile_row(unit, one.units[unit]) for unit in UNITS if unit in one.units],
        behaviour=judged_replies(one), training=training, no_training=_no_training(evidence, steps),
        events=[(name, n, EVENTS[name]) for name, n in steps.counts.items()] if steps else [],
        worst=worst_examples(one, text=text), certificate=certificate_facts(one),
    )  # fmt: skip


def _no_training(evidence: Evidence, steps: Course | None) -> str:
    """Why there is no picture of the course: without steps there is none, and a flat line would look like safety."""
    if not evidence.steps:
        return "No step of training is recorded, so there is nothing to draw."
    if steps is not None and steps.constrained:
        return "One step of training is recorded, which is no course to draw."
    unsteered = "This run logged no constraint while training: the limit did not steer it"
    return f"{unsteered}, it is only what the model was measured by."


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
        css = "good" if word == "certified" else "warn" if unchecked else "bad"
        rows.append(FigureRow("certify", "untouched", f"{c.regressions:,} of {c.n:,}", rate, upper, word, css))
    return rows


def _figure_row(one: SafetyEvidence, f: Figures, what: str) -> FigureRow:
    assert one.limit is not None, "of figures"
    fits = f.shown(one.limit.alpha)
    return FigureRow(
        f.role, what, f"{f.violations:,} of {f.n:,}", percent(f.rate), percent_up(f.upper), fits, TONES[fits]
    )


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


def worst_examples(one: SafetyEvidence, *, text: bool) -> WorstExamples:
    """The worst monitor examples; of a plain audit, the worst audited ones.

    Nothing of a certify split: its ids are left out, and an audit beside a certificate shows no example at all, since
    the certificate may be about the same prompts.
    """
    if one.table is None or one.limit is None:
        return WorstExamples("monitor", (), "There is no table of single examples.")
    roles = set(one.table["role"].to_pylist())
    role = "monitor" if "monitor" in roles else "audit"
    if role not in roles:
        return WorstExamples("monitor", (), "The run has no monitor examples.")
    if role == "audit" and one.certificate is not None:
        return WorstExamples(role, (), "Single examples stay closed: the certificate may be about the same prompts.")
    rows = _worst_rows(one, role)
    if not text:
        return WorstExamples(role, rows, "The text was left out on request.")
    texts, note = _texts(one.source, {row.id for row in rows})
    shown = (
        replace(row, prompt=_plain(texts[row.id].prompt), reply=_plain(texts[row.id].completion))
        if row.id in texts
        else row
        for row in rows
    )
    return WorstExamples(role, tuple(shown), note)


def _worst_rows(one: SafetyEvidence, role: str) -> tuple[Worst, ...]:
    assert one.limit is not None, "of a table"
    unit = one.limit.unit
    found = [
        Worst(row["id"], row["category"] or "", row[unit], row["tokens"], row["violated"])
        for row in one.table.select(["id", "role", "category", unit, "tokens", "violated"]).to_pylist()
        if row["role"] == role and row["id"] not in one.closed
    ]
    found.sort(key=lambda row: (-math.inf if math.isnan(row.degradation) else -row.degradation, row.id))
    return tuple(found[:WORST_SHOWN])


def _texts(source: Source | None, wanted: set[str]) -> tuple[dict[str, Example], str]:
    """The examples of the given ids; an id is a hash of the text, so a match is the very text that was measured."""
    if source is None or not source.data:
        return {}, "Where the safety data lies is not recorded, so the text is not shown."
    if not Path(source.data).is_file():
        return {}, "The safety data is no longer where it was (or is on the hub), so the text is not shown."
    try:
        if source.asked:
            examples = _stored_examples(Path(source.data))
        else:
            examples = read_examples(source.data, columns=source.columns, limit=source.limit)
    except (HoldfastError, OSError, ValueError, LookupError, TypeError):
        return {}, "The safety data has changed and cannot be read, so the text is not shown."
    found = {example.id: example for example in examples if example.id in wanted}
    if len(found) == len(wanted):
        return found, ""
    return found, f"The safety data has changed: {len(wanted) - len(found)} of these examples are no longer in it."


def _stored_examples(path: Path) -> list[Example]:
    """The examples of a run's `screening/held.jsonl`; those of the certify split have no reply there."""
    rows = [json.loads(line) for line in read_plain_file(path, remedy="").splitlines()]

    def side(value: Any) -> str | Turns:
        return value if isinstance(value, str) else tuple(value)

    return [make_example(side(r["prompt"]), side(r["completion"]), r["where"], r["category"]) for r in rows]


def _plain(side: str | Turns) -> str:
    if isinstance(side, str):
        return side
    if len(side) == 1:
        return said(side[0])
    return "\n\n".join(f"{turn['role']}: {said(turn)}" for turn in side)
