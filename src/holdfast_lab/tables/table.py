"""A table as data: columns, sections of rows, cells with mean, spread and mark. Formats are made from it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Literal

from holdfast_lab.tables.results import Result
from holdfast_lab.tables.wording import Metric, metric

Mark = Literal["best", "second"]
MISSING = "-"


@dataclass(frozen=True)
class Published:
    """A figure that the paper reports."""

    mean: float
    std: float | None


@dataclass(frozen=True)
class Cell:
    """One figure: mean and sample standard deviation (divisor n - 1) over seeds, its interval, mark and the paper's.

    `mean` is None where nothing was measured, `std` below two seeds, `poison_ratio` for the references. `low` and
    `high` are the confidence interval of one seed; of several the mean of theirs.
    """

    metric: str
    task: str
    poison_ratio: float | None
    mean: float | None
    std: float | None = None
    seeds: int = 0
    low: float | None = None
    high: float | None = None
    mark: Mark | None = None
    published: Published | None = None

    def text(self, value: float) -> str:
        """A value with the metric's decimals, as every format prints it."""
        return f"{value:.{metric(self.metric).decimals}f}"

    @property
    def displayed(self) -> Decimal | None:
        """The mean as printed: what ties are decided by, since a reader sees no more."""
        return None if self.mean is None else Decimal(self.text(self.mean))


@dataclass(frozen=True)
class Column:
    """A column: a heading over several, its metric (HS_qK where K is the section's), and what it fixes."""

    group: str
    metric: str
    task: str | None = None
    poison_ratio: float | None = None

    @property
    def shown(self) -> Metric:
        """Title, direction and decimals."""
        return metric(self.metric)


@dataclass(frozen=True)
class Row:
    """A row: its label, what it is, and a cell per column; a reference takes no part in the marks."""

    label: str
    defense: str
    align: str
    setting: str
    is_reference: bool
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Section:
    """Rows that are compared with one another; `title` is empty in a table of one section."""

    title: str
    model: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Table:
    """A table."""

    name: str  # the kind, as in `--table` and in the paper's figures: main, poison_sweep, ..
    slug: str  # its file name, unique among the tables of a report
    title: str  # one line, plain text
    head: str  # the heading of the row labels
    columns: tuple[Column, ...]
    sections: tuple[Section, ...]
    notes: tuple[str, ...] = ()  # lines under the table: what is missing, seeds, agreement
    used: frozenset[str] = frozenset()  # ids of the cells that entered

    @property
    def cells(self) -> list[Cell]:
        """Every figure of every section."""
        return [cell for section in self.sections for row in section.rows for cell in row.cells]

    @property
    def has_published(self) -> bool:
        """Whether any figure has the paper's beside it."""
        return any(cell.published for cell in self.cells)


def pooled(results: Iterable[Result], name: str, task: str, ratio: float | None) -> Cell:
    """The cell of `name` over the results of one row, one result a seed.

    Returns:
        mean and sample standard deviation (divisor n - 1), and the mean of the seeds' intervals over prompts, which
        does not shrink with more seeds since they see the same prompts; of one seed its value with its interval.
    """
    figures = [r.metrics[name] for r in results if name in r.metrics]
    if not figures:
        return Cell(name, task, ratio, None)
    if len(figures) == 1:
        return Cell(name, task, ratio, figures[0].value, None, 1, figures[0].low, figures[0].high)
    # `statistics` adds exactly, so that equal seeds have their own value as mean and a spread of 0.
    values = [figure.value for figure in figures]
    low, high = (_mean([getattr(figure, end) for figure in figures]) for end in ("low", "high"))
    return Cell(name, task, ratio, statistics.mean(values), statistics.stdev(values), len(values), low, high)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if len(known) == len(values) else None


def marked(rows: Sequence[Row], columns: Sequence[Column], *, second: bool, without: frozenset[str]) -> list[Row]:
    """The rows with the best (and second best) figure of each column marked.

    References and the defenses in `without` take no part. Ties by printed value share a mark, the second best is
    the next printed value, and a column in which all tie has no mark: nothing is better there.
    """
    marks: dict[tuple[int, int], Mark] = {}
    taking_part = [i for i, row in enumerate(rows) if not row.is_reference and row.defense not in without]
    for j, column in enumerate(columns):
        shown = {i: value for i in taking_part if (value := rows[i].cells[j].displayed) is not None}
        order = sorted(set(shown.values()), reverse=column.shown.better == "higher")
        if column.shown.better is None or len(order) < 2:
            continue
        for i, value in shown.items():
            if value == order[0]:
                marks[i, j] = "best"
            elif second and value == order[1]:
                marks[i, j] = "second"
    return [
        replace(row, cells=tuple(replace(cell, mark=marks.get((i, j))) for j, cell in enumerate(row.cells)))
        for i, row in enumerate(rows)
    ]
