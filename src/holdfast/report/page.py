"""`report.html`: one file with its style inside, no script, and a policy that forbids everything else."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from holdfast.core.errors import ConfigError
from holdfast.core.files import write_text
from holdfast.core.percent import exact_percent, percent_up
from holdfast.report.comparison import Paired, paired
from holdfast.report.distribution import drawn_range, survival_chart
from holdfast.report.evidence import Evidence
from holdfast.report.svg import Size
from holdfast.report.views import RunView, run_view, samples
from holdfast.report.wording import degraded_means, long_text, number, scale_words, visible

TEMPLATES = Path(__file__).parent / "templates"
FILE_NAME = "report.html"
PRIVATE = 0o600
SMALL = Size(336, 250, left=48, right=10)


@dataclass(frozen=True)
class Multiple:
    """The survival curves of one run, on axes shared by all runs."""

    label: str
    verdict_css: str
    chart: Markup


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


def multiples(runs: Sequence[Evidence], views: Sequence[RunView]) -> list[Multiple]:
    """One small survival chart a run, of its first safety set, all on the same axes."""
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
        Multiple(view.label, view.verdict.css, survival_chart(series, limit, window, SMALL, "both"))
        for series, limit, view in drawn
        if series and limit
    ]


def paired_words(row: Paired) -> str:
    """A paired comparison in one sentence."""
    if row.found is None:
        return f"{row.other} against {row.first}: not compared prompt by prompt, since {row.reason}."
    f = row.found
    corrected = f", {row.adjusted_p:.2g} after correcting for several comparisons (Holm)" if row.several else ""
    low, high = 100 * -f.upper, 100 * -f.lower
    return (
        f"{row.other} against {row.first}, on the same {f.n:,} {row.role} prompts: {f.only_b:,} degraded only in "
        f"{row.other}, {f.only_a:,} only in {row.first}, {f.both:,} in both. The rates differ by "
        f"{-100 * f.difference:+.1f} points ({exact_percent(f.confidence)} interval {low:+.1f} to {high:+.1f}); "
        f"exact McNemar test p = {f.p_value:.2g}{corrected}."
    )
