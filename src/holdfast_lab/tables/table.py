"""A table as data: columns, sections of rows, cells with mean, spread and mark; and how a planned one is filled.

A builder says which rows, sections and columns it has; `fill` finds the figures. Formats are made from it.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Literal

from holdfast.core.errors import DataError
from holdfast_lab.tables.lines import Line, Metric, metric, quantile
from holdfast_lab.tables.results import Result, require_one_protocol

Mark = Literal["best", "second"]
MISSING = "-"
Seeds = frozenset[int | None]
NAMED = 6  # rows named before a note says how many more


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
    name: str  # the kind, as in `--table` and in the paper's figures: main, poison_sweep, ...
    slug: str  # its file name, unique among the tables of a report
    title: str  # one line, plain text
    head: str  # the heading of the row labels
    columns: tuple[Column, ...]
    sections: tuple[Section, ...]
    notes: tuple[str, ...] = ()  # lines under the table: what is missing, seeds, agreement
    used: frozenset[str] = frozenset()  # ids of the cells that entered

    @property
    def cells(self) -> list[Cell]:
        return [cell for section in self.sections for row in section.rows for cell in row.cells]

    @property
    def has_published(self) -> bool:
        return any(cell.published for cell in self.cells)


def pooled(results: Iterable[Result], name: str, task: str, ratio: float | None) -> Cell:
    """The cell of `name` over the results of one row, one result a seed: mean and sample standard deviation.

    The interval is the mean of the seeds' intervals over prompts, which does not shrink with more seeds since they see
    the same prompts.
    """
    figures = [r.metrics[name] for r in results if name in r.metrics]

    def mean(values: Sequence[float | None]) -> float | None:
        """Added exactly, so that equal seeds have their own value as mean and a spread of 0."""
        known = [value for value in values if value is not None]
        return statistics.mean(known) if known and len(known) == len(values) else None

    value, low, high = (mean([getattr(figure, part) for figure in figures]) for part in ("value", "low", "high"))
    spread = statistics.stdev(figure.value for figure in figures) if len(figures) > 1 else None
    return Cell(name, task, ratio, value, spread, len(figures), low, high)


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


@dataclass(frozen=True)
class Block:
    """A section to be: its rows, and what its columns leave open."""

    title: str
    model: str
    lines: Sequence[Line]
    task: str | None = None
    poison_ratio: float | None = None  # of the defense rows; None takes whatever ratio there is
    same_seeds: bool = False  # compare on the seeds that all rows have, since a sweep has fewer than the default row


def fill(
    name: str, slug: str, title: str, columns: Sequence[Column], blocks: Sequence[Block], results: Sequence[Result], *,
    head: str = "Defense", notes: Sequence[str] = (), marks: bool = True, second: bool = True,
    without: frozenset[str] = frozenset(),
) -> Table:  # fmt: skip
    """Find the figures of a table among the `results` that may enter it, and mark the best of each column.

    `second`: the second best too; `without` are defenses that take no part in the marks.
    """
    require_one_protocol(results, slug)
    sections: list[Section] = []
    said, used = list(notes), set[str]()
    for block in blocks:
        _require_own_titles(slug, block.lines)
        seeds = _common_seeds(results, block) if block.same_seeds else None
        rows = []
        for line in block.lines:
            found = [_find(slug, results, block, line, column, seeds) for column in columns]
            used |= {result.cell for _, entered in found for result in entered}
            cells = tuple(cell for cell, _ in found)
            setting = line.stated or line.setting
            rows.append(Row(line.title, line.defense, line.align, setting, line.is_reference, cells))
        if marks:
            rows = marked(rows, columns, second=second, without=without)
        sections.append(Section(block.title, block.model, tuple(rows)))
        if seeds is not None:
            listed = ", ".join(map(str, sorted(seeds, key=lambda seed: -1 if seed is None else seed)))
            said.append(f"{block.title}: compared on the seeds that all rows have ({listed})".removeprefix(": "))
    table = Table(name, slug, title, head, tuple(columns), tuple(sections), used=frozenset(used))
    missing = sum(cell.mean is None for cell in table.cells)
    said += [f"{missing} of {len(table.cells)} figures are missing, shown as -"] if missing else []
    return replace(table, notes=(*said, *_seed_notes(table)))


def _require_own_titles(slug: str, lines: Sequence[Line]) -> None:
    titles: dict[str, Line] = {}
    for line in lines:
        if (other := titles.setdefault(line.title, line)) is not line:
            what = f"table {slug}: two rows are called {line.title!r} ({other.describe()} and {line.describe()})"
            raise DataError(what, remedy="give them different labels in the study")


def _seed_notes(table: Table) -> list[str]:
    counts: dict[str, list[int]] = {}
    for section, row in ((one, row) for one in table.sections for row in one.rows):
        for cell, column in zip(row.cells, table.columns, strict=True):
            if cell.seeds and not row.is_reference:
                where = " / ".join(part for part in (section.title, row.label, column.group) if part)
                counts.setdefault(where, []).append(cell.seeds)
    most = max(map(max, counts.values()), default=0)
    if most < 2:
        return ["one seed"] if most else []
    fewer = [f"{where} ({min(seen)})" for where, seen in counts.items() if min(seen) < most]
    rest = f" and {len(fewer) - NAMED} more" if len(fewer) > NAMED else ""
    over = f"mean ± sample standard deviation over {most} seeds"
    return [over, f"fewer seeds: {', '.join(fewer[:NAMED])}{rest}"] if fewer else [over]


def _find(
    slug: str, results: Sequence[Result], block: Block, line: Line, column: Column, seeds: Seeds | None
) -> tuple[Cell, list[Result]]:
    task = column.task if column.task is not None else block.task
    ratio = column.poison_ratio if column.poison_ratio is not None else block.poison_ratio
    assert task is not None
    name = f"HS_q{quantile(block.model)}" if column.metric == "HS_qK" else column.metric
    entered = _results_of(results, block, line, task)
    if line.is_reference:
        ratio = None
    else:
        entered = [r for r in entered if ratio in (None, r.poison_ratio) and (seeds is None or r.seed in seeds)]
    seen: dict[int | None, Result] = {}
    for result in entered:
        other = seen.setdefault(result.seed, result)
        if other is not result:
            raise DataError(
                f"table {slug}: cells {other.cell} and {result.cell} are the same figure "
                f"({result.model}, {result.task}, {result.label}, seed {result.seed}), expected one cell for it",
                remedy="give the two defenses different labels or settings in the study, or remove one result",
            )
    return pooled(entered, name, task, ratio), entered


def _results_of(results: Sequence[Result], block: Block, line: Line, task: str | None) -> list[Result]:
    return [r for r in results if (r.model, r.task) == (block.model, task) and line.holds(r)]


def _common_seeds(results: Sequence[Result], block: Block) -> Seeds | None:
    """The seeds that every measured row of a block has; None where rows do not differ or share none."""
    rows = [_results_of(results, block, line, block.task) for line in block.lines if not line.is_reference]
    every = [frozenset(r.seed for r in found if r.poison_ratio == block.poison_ratio) for found in rows]
    each: list[Seeds] = [seeds for seeds in every if seeds]
    common = frozenset.intersection(*each) if each else frozenset()
    return common if common and any(seeds != common for seeds in each) else None
