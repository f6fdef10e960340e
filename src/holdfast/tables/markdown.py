"""A table in Markdown: one pipe table a section, best in bold, second best underlined."""

from __future__ import annotations

import re

from holdfast.tables.layout import PAPER, Printed, Style, column_title, legend, printed_rows, section_heading, spread
from holdfast.tables.table import Column, Table


def markdown(table: Table, style: Style) -> str:
    """The table with its title as a heading and its notes as a list."""
    out = [f"### {escape(table.title)}", ""]
    for section in table.sections:
        title = section_heading(table, section)
        out += [f"**{escape(title)}**", ""] if title else []
        out.append(_line([escape(table.head), *(_title(column) for column in table.columns)]))
        out.append(_line(["---", *("---:" for _ in table.columns)]))
        for printed in printed_rows(section):
            out.append(_line([_label(printed), *(_cell(printed, j, style) for j in range(len(table.columns)))]))
        out.append("")
    marks = legend(table, "**bold**", "<u>underlined</u>")
    notes = [f"- {line}" for line in (*marks, *(escape(note) for note in table.notes))]
    return "\n".join([*out, *notes]).rstrip() + "\n"


def escape(text: str) -> str:
    """Text that means itself in Markdown, also inside a pipe table."""
    flat = " ".join(text.split())
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", flat)


def _title(column: Column) -> str:
    return escape(f"{column.group} {column_title(column)}".strip())


def _label(printed: Printed) -> str:
    return f"&nbsp;&nbsp;*{PAPER}*" if printed.is_paper else escape(printed.row.label)


def _cell(printed: Printed, column: int, style: Style) -> str:
    cell = printed.row.cells[column]
    value, after = spread(cell, style, printed.is_paper)
    if not printed.is_paper and cell.mark:
        value = f"**{value}**" if cell.mark == "best" else f"<u>{value}</u>"
    return f"{value} {after}".strip().replace("[", "\\[").replace("]", "\\]")


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
