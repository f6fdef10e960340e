"""A table for the terminal: plain text with lines, best figure `*`, second best `°`, stacked where it is too wide."""

from __future__ import annotations

import textwrap

from holdfast_lab.tables.layout import (
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
from holdfast_lab.tables.table import Table

MARKS = {"best": "*", "second": "°", None: " "}
GAP = "  "


def text(table: Table, style: Style, *, width: int = 100) -> str:
    """The table in lines of at most `width` characters where its columns allow it."""
    printed = [row for section in table.sections for row in printed_rows(section)]
    labels = max([len(table.head), *(len(_label(row)) for row in printed)])
    titles = [column_title(column) for column in table.columns]
    widths = [max([len(title), *(len(_cell(row, j, style)) for row in printed)]) for j, title in enumerate(titles)]
    out = [table.title]
    for stack in _stacks(table, widths, width - labels):
        out += ["", *_block(table, stack, style, labels, widths)]
    wrapped = [
        textwrap.wrap(note, max(width, 40), initial_indent="  ", subsequent_indent="    ", break_long_words=False)
        for note in (*legend(table, "*", "°"), *table.notes)
    ]
    out += ["", *(line for lines in wrapped for line in lines)] if wrapped else []
    return "\n".join(line.rstrip() for line in out) + "\n"


def _stacks(table: Table, widths: list[int], width: int) -> list[list[int]]:
    headed = any(column.group for column in table.columns)
    units = [members for _, members in groups(table)] if headed else [[j] for j in range(len(widths))]
    stacks: list[list[int]] = []
    left = 0
    for unit in units:
        needed = sum(len(GAP) + widths[j] for j in unit)
        if not stacks or needed > left:
            stacks.append([])
            left = width
        stacks[-1] += unit
        left -= needed
    return stacks


def _block(table: Table, columns: list[int], style: Style, labels: int, widths: list[int]) -> list[str]:
    total = labels + sum(len(GAP) + widths[j] for j in columns)
    lines = []
    if any(table.columns[j].group for j in columns):
        heading = " " * labels
        for name, members in groups(table):
            if inside := [j for j in members if j in columns]:
                heading += GAP + name.center(sum(widths[j] + len(GAP) for j in inside) - len(GAP), "─")
        lines.append(heading)
    titles = (GAP + column_title(table.columns[j]).ljust(widths[j]) for j in columns)
    lines.append(table.head.ljust(labels) + "".join(titles))
    for section in table.sections:
        title = section_heading(table, section)
        lines.append(f"── {title} ".ljust(total, "─") if title else "─" * total)
        for printed in printed_rows(section):
            cells = (GAP + _cell(printed, j, style).ljust(widths[j]) for j in columns)
            lines.append(_label(printed).ljust(labels) + "".join(cells))
    return lines


def _label(printed: Printed) -> str:
    return f"  {PAPER}" if printed.is_paper else printed.row.label


def _cell(printed: Printed, column: int, style: Style) -> str:
    cell = printed.row.cells[column]
    value, after = spread(cell, style, printed.is_paper)
    return f"{value}{' ' if printed.is_paper else MARKS[cell.mark]}{after}".rstrip()
