"""Two studies of the same rows beside each other: does a replication order them alike, and does holdfast stay ahead?

No figure mixes the two. Seeds of one study share an alignment and a judge and are no independent draws of those, and
two studies are too few for an interval over them: what is counted is in how many seeds holdfast lies below a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.tables.agreement import FEWEST, spearman
from holdfast.tables.choosing import place_title
from holdfast.tables.compared import (
    OURS,
    Rows,
    attacked,
    column_title,
    compared_rows,
    figure,
    mean_of,
    start_of,
    table_line,
)
from holdfast.tables.markdown import escape
from holdfast.tables.pareto import HARM
from holdfast.tables.protocols import differences
from holdfast.tables.results import Result
from holdfast.tables.table import MISSING
from holdfast.tables.utility import utility_of
from holdfast.tables.wording import defense_title, metric

HEAD = ("moved", "holdfast minus the row, each seed there", "each seed here", "holdfast below the row")


def replicated(first: Sequence[Result], again: Sequence[Result]) -> str:
    """Per model and task that both studies have: every row of both, and holdfast's distance to it seed by seed."""
    there = {(model, task, ratio): group for model, task, group, ratio in attacked(first)}
    parts = []
    for model, task, group, ratio in attacked(again):
        other = there.get((model, task, ratio))
        names = [name for name in compared_rows(group) if name in compared_rows(other or [])]
        if other is None or not names:
            continue
        title = escape(place_title(model, task, ratio))
        parts += [f"**{title}**: {_summary(other, group, names)}", ""]
        head = ["Row", *(f"{column_title(HARM)}, {where}" for where in ("there", "here")), *HEAD]
        parts += [table_line(head), table_line(["---", *["---:"] * (len(head) - 1)]), *_lines(other, group), ""]
    if not parts:
        return ""
    return "\n".join([*_protocols(first, again), "", *parts]).rstrip() + "\n"


def _summary(first: Sequence[Result], again: Sequence[Result], names: Sequence[str]) -> str:
    """How alike the rows are ordered, and the largest move."""
    there, here = compared_rows(first), compared_rows(again)
    orders = []
    for name in dict.fromkeys((HARM, utility_of([*first, *again]))):
        pairs = [(mean_of(there[row], name), mean_of(here[row], name)) for row in names]
        value = spearman(*zip(*pairs, strict=True)) if len(pairs) >= FEWEST else None
        orders.append(f"{escape(metric(name).title)} {'undefined' if value is None else f'{value:+.2f}'}")
    moved = {row: _apart(mean_of(here[row], HARM), mean_of(there[row], HARM)) for row in names}
    most = max(moved, key=lambda row: abs(moved[row]))
    return f"{len(names)} rows in both, Spearman: {', '.join(orders)}; largest move {moved[most]:+.3f} ({escape(most)})"


def _lines(first: Sequence[Result], again: Sequence[Result]) -> Iterator[str]:
    ours = defense_title(OURS)
    there, here = (_with_start(group, ours) for group in (first, again))
    for name in (name for name in here if name in there):
        means = [mean_of(rows[name], HARM) for rows in (there, here)]
        each = [_each(rows, ours, name) for rows in (there, here)]
        below = [value < 0 for values in each for value in values]
        shown = [", ".join(f"{value:+.3f}" for value in values) or MISSING for values in each]
        count = f"{sum(below)} of {len(below)}" if below else MISSING
        figures = [figure(_once(rows[name]), HARM) for rows in (there, here)]
        yield table_line([escape(name), *figures, f"{_apart(means[1], means[0]):+.3f}", *shown, count])


def _with_start(group: Sequence[Result], ours: str) -> Rows:
    """The rows, before them the aligned model that holdfast started from."""
    rows = compared_rows(group)
    return {**start_of(group, rows[ours]), **rows} if ours in rows else rows


def _each(rows: Rows, ours: str, name: str) -> list[float]:
    """Holdfast minus a row, by the seeds that both have."""
    if name == ours or ours not in rows:
        return []
    a, b = ({r.seed or 0: r.metrics[HARM].value for r in rows[row] if HARM in r.metrics} for row in (ours, name))
    return [_apart(a[seed], b[seed]) for seed in sorted(a.keys() & b.keys())]


def _apart(a: float, b: float) -> float:
    """The difference without what floating point adds to it: two equal shares are equal."""
    return round(a - b, 9) + 0.0


def _once(row: Sequence[Result]) -> list[Result]:
    """A model before fine-tuning stands there once for every seed it is compared with."""
    return list({result.cell: result for result in row}.values())


def _protocols(first: Sequence[Result], again: Sequence[Result]) -> list[str]:
    found = list(differences(first[0].protocol, again[0].protocol)) if first and again else []
    fields = [field.partition(":")[0] for field in found]
    return [f"The protocols differ in {', '.join(f'`{one}`' for one in fields)}." if fields else "One protocol."]
