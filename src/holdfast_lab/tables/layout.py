"""What every format prints: rows of a section with the paper's figures under them, titles, legend, values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast_lab.tables.table import MISSING, Cell, Column, Row, Section, Table

ARROWS = {"lower": "↓", "higher": "↑", None: ""}
PAPER = "paper"


@dataclass(frozen=True)
class Style:
    """Settings of all formats; `intervals` shows the confidence interval of figures of one seed."""

    intervals: bool = False


@dataclass(frozen=True)
class Printed:
    """A row as it is printed: a row of ours, or the paper's figures for the row above."""

    row: Row
    is_paper: bool = False


def printed_rows(section: Section) -> Iterator[Printed]:
    """The rows of a section, each followed by the paper's figures where there are any."""
    for row in section.rows:
        yield Printed(row)
        if any(cell.published for cell in row.cells):
            yield Printed(row, is_paper=True)


def spread(cell: Cell, style: Style, is_paper: bool = False) -> tuple[str, str]:
    """(value, what follows it): the value or `-`, and its `± std` or interval without the sign between."""
    if is_paper:
        found = cell.published
        if found is None:
            return "", ""
        return cell.text(found.mean), "" if found.std is None else f"± {cell.text(found.std)}"
    if cell.mean is None:
        return MISSING, ""
    if cell.std is not None:
        return cell.text(cell.mean), f"± {cell.text(cell.std)}"
    if style.intervals and cell.low is not None and cell.high is not None:
        return cell.text(cell.mean), f"[{cell.text(cell.low)}, {cell.text(cell.high)}]"
    return cell.text(cell.mean), ""


def column_title(column: Column) -> str:
    """The metric and its better direction."""
    return f"{column.shown.title} {ARROWS[column.shown.better]}".strip()


def groups(table: Table) -> list[tuple[str, list[int]]]:
    """Neighbouring columns under one heading: (heading, column numbers)."""
    found: list[tuple[str, list[int]]] = []
    for number, column in enumerate(table.columns):
        if found and found[-1][0] == column.group:
            found[-1][1].append(number)
        else:
            found.append((column.group, [number]))
    return found


def legend(table: Table, best: str, second: str) -> list[str]:
    """What the marks mean, for those that occur: `best` and `second` are how a format shows them."""
    marks = {cell.mark for cell in table.cells} - {None}
    words = [f"{best} best", f"{second} second best"][: len(marks)]
    return [", ".join(words)] if words else []


def section_heading(table: Table, section: Section) -> str:
    """A section's title; a table of one section has none unless it says something that the table's title does not."""
    return section.title if len(table.sections) > 1 or section.title not in table.title else ""
