"""`report`: `report.html`, one file with its style inside, no script, and a policy that forbids everything else.

Several runs stand side by side in `comparison.html`: they are compared with the first one where the same prompts were
measured.
"""

import base64
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from holdfast.certification.comparison import PromptComparison, compare_prompts
from holdfast.certification.share import adjusted
from holdfast.core.errors import ConfigError
from holdfast.core.files import write_text
from holdfast.core.percent import exact_percent, percent_up
from holdfast.reporting.card import Card, write_cards
from holdfast.reporting.distribution import drawn_range, survival_chart
from holdfast.reporting.evidence import Evidence, SafetyEvidence
from holdfast.reporting.read import read_evidence
from holdfast.reporting.svg import Size
from holdfast.reporting.views import RunView, run_view, samples
from holdfast.reporting.wording import degraded_means, long_text, number, scale_words, visible

TEMPLATES = Path(__file__).parent / "templates"
FILE_NAME, COMPARISON_NAME = "report.html", "comparison.html"
PRIVATE = 0o600
SMALL = Size(336, 250, left=48, right=10)


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes:
        path: the page.
        runs: what it says of each run: `label`, `claim`, and `verdict` with its title and reason.
        cards: the model cards; one with a user's own text is kept.
    """

    path: Path
    runs: list[RunView]
    cards: list[Card]


def report(*runs: str | Path, output: str | Path | None = None, text: bool = True) -> Report:
    """Write a page, which needs no network and no script, and model cards; several runs stand side by side.

    Args:
        runs: run folders, or output folders of an audit or certification.
        output: the page; report.html in the run's folder, or comparison.html in the first folder of several.
        text: whether the page holds the text of examples, hidden until clicked.
    """
    if not runs:
        raise ConfigError("report() has no run", remedy="give the folder of a run: report('runs/first')")
    evidence = [read_evidence(Path(folder)) for folder in runs]
    name = FILE_NAME if len(runs) == 1 else COMPARISON_NAME
    path = Path(runs[0]) / name if output is None else Path(output)
    views = write_report(evidence, path, text=text)
    return Report(path, views, [card for one in evidence for card in write_cards(one)])


def write_report(runs: Sequence[Evidence], path: Path, *, text: bool = True) -> list[RunView]:
    """Write the page; readable by its owner alone where it holds text of examples."""
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder; expected a file", remedy=f"give {path / FILE_NAME}")
    views = [
        run_view(run, label=label, anchor=f"run-{i}", text=text)
        for i, (run, label) in enumerate(zip(runs, labels(runs), strict=True), start=1)
    ]
    has_text = any(one.worst.has_text for view in views for one in view.sets)
    write_text(path, render(runs, views), mode=PRIVATE if has_text else None)
    return views


def labels(runs: Sequence[Evidence]) -> list[str]:
    """Folder names; whole paths where names repeat."""
    seen = Counter(run.name for run in runs)
    return [run.name if seen[run.name] == 1 else str(run.folder) for run in runs]


def render(runs: Sequence[Evidence], views: Sequence[RunView]) -> str:
    """The page as text, all of it valid UTF-8."""
    style = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    values = {
        "style": Markup(style),  # noqa: S704  (our own file)
        "policy": policy(style),
        "views": views,
        "several": len(views) > 1,
        "multiples": multiples(runs, views),
        "pairs": paired(runs, [view.label for view in views]) if len(runs) > 1 else [],
        "title": views[0].label if len(views) == 1 else f"{len(views)} runs",
    }
    return environment().get_template("page.html.j2").render(values) + "\n"


def environment() -> Environment:
    """Every value is escaped, every hidden character made visible, every undefined name an error."""
    found = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, finalize=_shown,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    found.filters.update(exact_percent=exact_percent, percent_up=percent_up, number=number, long=long_text)
    found.globals.update(paired_words=paired_words, degraded_means=degraded_means, scale_words=scale_words)
    return found


def _shown(value: Any) -> Any:
    if isinstance(value, Markup) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, str):
        return visible(value).replace(" %", "\N{NO-BREAK SPACE}%")
    raise TypeError(f"the page was given {type(value).__name__}, expected words")


def policy(style: str) -> str:
    """The content security policy: our style by its hash, and nothing else at all."""
    digest = base64.b64encode(hashlib.sha256(style.encode("utf-8")).digest()).decode("ascii")
    return f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"


def multiples(runs: Sequence[Evidence], views: Sequence[RunView]) -> list[tuple[str, str, Markup]]:
    """Label, verdict's colour and a small survival chart of each run's first safety set, all on the same axes."""
    if len(runs) < 2:
        return []
    firsts = [(run.sets[0], view) for run, view in zip(runs, views, strict=True)]
    drawn = [(samples(one), one.limit, view) for one, view in firsts]
    every = [values for series, _, _ in drawn for _, values in series]
    taus = [limit.tau for series, limit, _ in drawn if series and limit]
    if not every:
        return []
    window = drawn_range(every, max(taus))
    return [
        (view.label, view.verdict.css, survival_chart(series, limit, window, SMALL, "both"))
        for series, limit, view in drawn
        if series and limit
    ]


@dataclass(frozen=True)
class Paired:
    """A run against the first one on the prompts of one safety set, or the reason why not."""

    first: str
    other: str
    role: str = ""
    found: PromptComparison | None = None
    adjusted_p: float = float("nan")
    several: bool = False
    reason: str = ""


def paired(runs: Sequence[Evidence], labels: Sequence[str]) -> list[Paired]:
    """Every later run against the first, per safety set; p-values of several comparisons are corrected (Holm)."""
    rows = []
    for one in runs[0].sets:
        for run, label in zip(runs[1:], labels[1:], strict=True):
            other = next((s for s in run.sets if s.name == one.name), None)
            rows.append(_pair(one, other, labels[0], label))
    p_values = {str(i): row.found.p_value for i, row in enumerate(rows) if row.found is not None}
    corrected = adjusted(p_values) if p_values else {}
    return [
        replace(row, adjusted_p=corrected.get(str(i), row.adjusted_p), several=len(p_values) > 1)
        for i, row in enumerate(rows)
    ]


def _pair(a: SafetyEvidence, b: SafetyEvidence | None, first: str, other: str) -> Paired:
    reason = _obstacle(a, b)
    if reason or b is None:
        return Paired(first, other, reason=reason)
    rows = [one.table.select(["id", "role", "violated"]).to_pylist() for one in (a, b)]
    role = "monitor" if any(row["role"] == "monitor" for found in rows for row in found) else "audit"
    left, right = ({row["id"]: row["violated"] for row in found if row["role"] == role} for found in rows)
    without = [label for label, found in ((first, left), (other, right)) if not found]
    if without:
        has = "have" if len(without) > 1 else "has"
        return Paired(first, other, reason=f"{' and '.join(without)} {has} no {role} examples")
    if set(left) != set(right):
        return Paired(first, other, reason=f"their {role} examples are not the same")
    ids = sorted(left)
    found = compare_prompts(np.array([left[i] for i in ids]), np.array([right[i] for i in ids]))
    return Paired(first, other, role, found)


def _obstacle(a: SafetyEvidence, b: SafetyEvidence | None) -> str:
    """Why the two cannot be compared prompt by prompt; empty where they can."""
    if b is None:
        return "it has no safety set of that name"
    if a.table is None or b.table is None or a.limit is None or b.limit is None:
        return "audit.parquet is missing in one of them"
    if not a.limit.same_question(b.limit):
        return "tau or the unit differs"
    audits = [one.audit for one in (a, b)]
    before = {audit.inner("before").text("sha256", "") if audit else "" for audit in audits}
    if any(audit and "endpoint" in audit.inner("before") for audit in audits):
        return "the model before is behind an endpoint, and nobody saw its weights"
    return "they start from different models" if len(before) > 1 else ""


def paired_words(row: Paired) -> str:
    if row.found is None:
        return f"{row.other} against {row.first}: not compared prompt by prompt, since {row.reason}."
    f = row.found
    corrected = f", {row.adjusted_p:.2g} after correcting for several comparisons (Holm)" if row.several else ""
    difference, low, high = (f"{round(-100 * share, 1) + 0.0:+.1f}" for share in (f.difference, f.upper, f.lower))
    return (
        f"{row.other} against {row.first}, on the same {f.n:,} {row.role} prompts: {f.only_b:,} degraded only in "
        f"{row.other}, {f.only_a:,} only in {row.first}, {f.both:,} in both. The rates differ by "
        f"{difference} points ({exact_percent(f.confidence)} interval {low} to {high}); "
        f"exact McNemar test p = {f.p_value:.2g}{corrected}."
    )
