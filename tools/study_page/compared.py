"""The rows that harm and utility are compared by, and their figures in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tools.study_page.pareto import Difference

from holdfast_lab.tables.formats import ARROWS, Style, spread
from holdfast_lab.tables.formats import escape_markdown as escape
from holdfast_lab.tables.lines import at_ratio, attack_ratio, by_model_and_task, lines_of, measured, metric
from holdfast_lab.tables.results import Result, require_one_protocol
from holdfast_lab.tables.table import pooled

OURS, PLAIN = "holdfast", "sft"
Rows = dict[str, list[Result]]


def attacked(results: Sequence[Result], table: str = "pareto") -> list[tuple[str, str, list[Result], float | None]]:
    """(model, task, results at the attack's ratio, ratio) wherever something was fine-tuned."""
    found = measured(results)
    require_one_protocol(found, table)
    ratio = attack_ratio(found)
    groups = by_model_and_task(at_ratio(found, ratio))
    return [(m, t, group, ratio) for m, t, group in groups if not all(r.is_reference for r in group)]


def compared_rows(group: Sequence[Result]) -> Rows:
    """The rows that are compared; variants of ours and rows on another alignment have tables of their own."""
    usual = [result for result in group if not result.is_reference and result.align in (PLAIN, result.defense)]
    tuned = [result for result in usual if not (result.defense == OURS and result.setting)]
    lines = lines_of(tuned)
    titles = Counter(line.title for line in lines)
    return {
        # A defense of both stages may have been run on its own alignment and on the plain one.
        line.title if titles[line.title] == 1 or line.align != PLAIN else f"{line.title} on SFT-aligned": [
            result for result in tuned if line.holds(result)
        ]
        for line in lines
    }


def start_of(group: Sequence[Result], ours: Sequence[Result]) -> Rows:
    """The aligned model that ours started from, once per seed of ours: it has no seed of its own."""
    aligned = [line for line in lines_of(group) if line.defense == "aligned" and line.align == ours[0].align]
    return {
        line.title: [replace(one, seed=result.seed) for one in group if line.holds(one) for result in ours]
        for line in aligned
    }


def mean_of(row: Sequence[Result], name: str) -> float | None:
    """The mean over seeds; None where no result has the metric."""
    return pooled(row, name, row[0].task, None).mean


def figure(row: Sequence[Result], name: str) -> str:
    """Mean and spread as the tables show them."""
    value, after = spread(pooled(row, name, "", None), Style(intervals=True))
    return f"{value} {after}".strip().replace("[", "\\[").replace("]", "\\]")


def signed(one: Difference) -> str:
    """A difference with its sign and interval."""
    return f"{one.value:+.3f} \\[{one.low:+.3f}, {one.high:+.3f}\\]"


def column_title(name: str) -> str:
    """The metric with the arrow that says what is better."""
    return f"{escape(metric(name).title)} {ARROWS[metric(name).better]}".strip()
