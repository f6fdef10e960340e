"""Two studies of the same rows beside each other: does a replication order them alike, and does holdfast stay ahead?

No figure mixes the two. Seeds of one study share an alignment and a judge and are no independent draws of those, and
two studies are too few for an interval over them: what is counted is in how many seeds holdfast lies below a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tools.study_page.compared import OURS, Rows, attacked, column_title, compared_rows, figure, mean_of, start_of
from tools.study_page.pareto import HARM
from tools.study_page.stored import steered

from holdfast.core.errors import DataError
from holdfast_lab.tables.formats import escape_markdown as escape
from holdfast_lab.tables.formats import table_line
from holdfast_lab.tables.lines import defense_title, metric, place_title, utility_of
from holdfast_lab.tables.reported import FEWEST, spearman
from holdfast_lab.tables.results import Result, differences
from holdfast_lab.tables.table import MISSING

HEAD = ("moved", "holdfast minus the row, each seed there", "each seed here", "holdfast below the row")
NOTHING = "The two studies have no row in common: same model, task, poison ratio and alignment."


def replicated(first: Sequence[Result], again: Sequence[Result]) -> str:
    """Per model and task that both studies have: every row of both, and holdfast's distance to it seed by seed.

    Raises:
        DataError: a study of several protocols, or a cell that is in both.
    """
    _require_two(first, again)
    there = {(model, task, ratio): group for model, task, group, ratio in attacked(first, "replicated, there")}
    parts, pair = [], None
    for model, task, group, ratio in attacked(again, "replicated, here"):
        other = there.get((model, task, ratio), [])
        before, now = _with_start(other), _with_start(group)
        names = [name for name in now if name in before and _alike(before[name], now[name])]
        rows = [name for name in names if not now[name][0].is_reference]
        if not rows:
            continue
        utility = utility_of([*other, *group])
        pair = pair or (before[rows[0]][0], now[rows[0]][0])
        parts.append(f"**{escape(place_title(model, task, ratio))}**: {_summary(before, now, rows, utility)}")
        parts += ["", *_head(), *(_line(before, now, name) for name in names), ""]
        parts += [f"- {line}" for line in (*_left_out(before, now, names), *_settings(before, now, rows))]
        parts.append("")
    return "\n".join([*_protocols(*pair), "", *parts]).rstrip() + "\n" if pair else NOTHING + "\n"


def _require_two(first: Sequence[Result], again: Sequence[Result]) -> None:
    there = {result.cell: result for result in first}
    for one in again:
        other = None if one.is_reference else there.get(one.cell)  # a model that nothing trained is the same in both
        if other is not None and (other.protocol_sha256, other.metrics) == (one.protocol_sha256, one.metrics):
            raise DataError(
                f"{other.path} and {one.path} are one measurement, expected two studies",
                remedy="name the results of another study",
            )


def _with_start(group: Sequence[Result]) -> Rows:
    """The rows with a harm, before them the aligned model that holdfast started from."""
    rows, ours = compared_rows(group), defense_title(OURS)
    found = {**start_of(group, rows[ours]), **rows} if ours in rows else rows
    return {name: row for name, row in found.items() if mean_of(row, HARM) is not None}


def _alike(one: Sequence[Result], other: Sequence[Result]) -> bool:
    """A row by the same name may stand on another alignment."""
    return one[0].align == other[0].align


def _summary(there: Rows, here: Rows, names: Sequence[str], utility: str) -> str:
    """How alike the rows are ordered, and the largest move."""
    orders = [_order(there, here, names, one) for one in (HARM, utility)]
    moved = {name: _apart(_harm(here[name]), _harm(there[name])) for name in names}
    most = max(moved, key=lambda row: abs(moved[row]))
    return f"{len(names)} rows in both, Spearman: {', '.join(orders)}; largest move {moved[most]:+.3f} ({escape(most)})"


def _order(there: Rows, here: Rows, names: Sequence[str], name: str) -> str:
    means = [(mean_of(there[row], name), mean_of(here[row], name)) for row in names]
    pairs = [(a, b) for a, b in means if a is not None and b is not None]
    value = spearman(*zip(*pairs, strict=True)) if len(pairs) >= FEWEST else None
    fewer = "" if len(pairs) == len(names) else f" ({len(pairs)} rows)"
    return f"{escape(metric(name).title)} {'undefined' if value is None else f'{value:+.2f}'}{fewer}"


def _head() -> Iterator[str]:
    head = ["Row", *(f"{column_title(HARM)}, {where}" for where in ("there", "here")), *HEAD]
    yield from (table_line(head), table_line(["---", *["---:"] * (len(head) - 1)]))


def _line(there: Rows, here: Rows, name: str) -> str:
    each = [_each(rows, name) for rows in (there, here)]
    below = [value < 0 for values in each for value in values]
    shown = [", ".join(f"{value:+.3f}" for value in values) or MISSING for values in each]
    figures = [figure(_once(rows[name]), HARM) for rows in (there, here)]
    moved = _apart(_harm(here[name]), _harm(there[name]))
    count = f"{sum(below)} of {len(below)}" if below else MISSING
    return table_line([escape(name), *figures, f"{moved:+.3f}", *shown, count])


def _each(rows: Rows, name: str) -> list[float]:
    """Holdfast minus a row, by the seeds that both have."""
    ours = defense_title(OURS)
    if name == ours or ours not in rows:
        return []
    a, b = ({r.seed or 0: r.metrics[HARM].value for r in rows[row] if HARM in r.metrics} for row in (ours, name))
    return [_apart(a[seed], b[seed]) for seed in sorted(a.keys() & b.keys())]


def _harm(row: Sequence[Result]) -> float:
    value = mean_of(row, HARM)
    assert value is not None  # `_with_start` leaves such rows out
    return value


def _apart(a: float, b: float) -> float:
    """The difference without what floating point adds to it: two equal shares are equal."""
    return round(a - b, 9) + 0.0


def _once(row: Sequence[Result]) -> list[Result]:
    """A model before fine-tuning stands there once for every seed it is compared with."""
    return list({result.cell: result for result in row}.values())


def _left_out(there: Rows, here: Rows, names: Sequence[str]) -> Iterator[str]:
    for where, rows in (("there", there), ("here", here)):
        if alone := [escape(name) for name in rows if name not in names]:
            yield f"{where} alone: {' / '.join(alone)}"


def _settings(there: Rows, here: Rows, names: Sequence[str]) -> Iterator[str]:
    """Rows of one name whose constraints differ."""
    for name in names:
        one, other = ({**rows[name][0].constraint, **steered(rows[name][0])} for rows in (there, here))
        if fields := list(differences(one, other)):
            yield f"{escape(name)} ran with other settings: {escape(', '.join(fields))}"


def _protocols(one: Result, other: Result) -> list[str]:
    fields = [field.partition(":")[0] for field in differences(one.protocol, other.protocol)]
    return [f"The protocols differ in {', '.join(f'`{one}`' for one in fields)}." if fields else "One protocol."]
