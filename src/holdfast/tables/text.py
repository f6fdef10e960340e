"""A table for the terminal: plain text with lines, best figure `*`, second best `°`, stacked where it is too wide."""

from __future__ import annotations

import textwrap

from holdfast.tables.layout import (
    PAPER,
    Printed,
    Style,
    column_title,
    groups,
    legend,
    printed_rows,
    section_heading,
    spread,
)
from holdfast.tables.table import Table

MARKS = {"best": "*", "second": "°", None: " "}
GAP = "  "


def text(table: Table, style: Style, *, width: int = 100) -> str:
    """The table in lines of at most `width` characters where its columns allow it."""
    out = [table.title]
    for stack in _stacks(table, style, width):
        out += ["", *_block(table, stack, style)]
    notes = [*legend(table, "*", "°"), *table.notes]
    out += ["", *(line for note in notes for line in _wrapped(note, width))] if notes else []
    return "\n".join(line.rstrip() for line in out) + "\n"


def _wrapped(note: str, width: int) -> list[str]:
    return textwrap.wrap(note, max(width, 40), initial_indent="  ", subsequent_indent="    ", break_long_words=False)


def _block(table: Table, columns: list[int], style: Style) -> list[str]:
    """One stack: headings, then every section with these columns."""
    labels = max([len(table.head), *(len(_label(p)) for s in table.sections for p in printed_rows(s))])
    widths = {j: _width(table, j, style) for j in columns}
    total = labels + sum(len(GAP) + widths[j] for j in columns)
    lines = []
    if any(table.columns[j].group for j in columns):
        heading = " " * labels
        for name, members in groups(table):
            inside = [j for j in members if j in columns]
            if inside:
                heading += GAP + name.center(sum(widths[j] for j in inside) + len(GAP) * (len(inside) - 1), "─")
        lines.append(heading)
    lines.append(table.head.ljust(labels) + "".join(GAP + _title(table, j).ljust(widths[j]) for j in columns))
    for section in table.sections:
        title = section_heading(table, section)
        lines.append(f"── {title} ".ljust(total, "─") if title else "─" * total)
        for printed in printed_rows(section):
            cells = (GAP + _cell(printed, j, style).ljust(widths[j]) for j in columns)
            lines.append(_label(printed).ljust(labels) + "".join(cells))
    return lines


def _stacks(table: Table, style: Style, width: int) -> list[list[int]]:
    """Columns side by side as far as the width goes; those under one heading stay together."""
    labels = max([len(table.head), *(len(_label(p)) for s in table.sections for p in printed_rows(s))])
    units = [[j] for _, members in groups(table) for j in members]
    if any(column.group for column in table.columns):
        units = [members for _, members in groups(table)]
    stacks: list[list[int]] = []
    left = 0
    for unit in units:
        needed = sum(len(GAP) + _width(table, j, style) for j in unit)
        if not stacks or needed > left:
            stacks.append([])
            left = width - labels
        stacks[-1] += unit
        left -= needed
    return stacks


def _label(printed: Printed) -> str:
    return f"  {PAPER}" if printed.is_paper else printed.row.label


def _title(table: Table, column: int) -> str:
    return column_title(table.columns[column])


def _width(table: Table, column: int, style: Style) -> int:
    found = [len(_cell(p, column, style)) for section in table.sections for p in printed_rows(section)]
    return max([len(_title(table, column)), *found])


def _cell(printed: Printed, column: int, style: Style) -> str:
    cell = printed.row.cells[column]
    value, after = spread(cell, style, printed.is_paper)
    mark = " " if printed.is_paper else MARKS[cell.mark]
    return f"{value}{mark}{after}".rstrip()
