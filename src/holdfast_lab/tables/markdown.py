"""A table in Markdown: one pipe table a section, best in bold, second best underlined."""

from __future__ import annotations

import re
from collections.abc import Sequence

from holdfast_lab.tables.layout import (
    PAPER,
    Printed,
    Style,
    column_title,
    legend,
    printed_rows,
    section_heading,
    spread,
)
from holdfast_lab.tables.table import Table


def markdown(table: Table, style: Style) -> str:
    """The table with its title as a heading and its notes as a list."""
    out = [f"### {escape(table.title)}", ""]
    titles = [escape(f"{column.group} {column_title(column)}".strip()) for column in table.columns]
    for section in table.sections:
        title = section_heading(table, section)
        out += [f"**{escape(title)}**", ""] if title else []
        out += [table_line([escape(table.head), *titles]), table_line(["---", *["---:"] * len(titles)])]
        for printed in printed_rows(section):
            label = f"&nbsp;&nbsp;*{PAPER}*" if printed.is_paper else escape(printed.row.label)
            out.append(table_line([label, *(_cell(printed, j, style) for j in range(len(titles)))]))
        out.append("")
    marks = legend(table, "**bold**", "<u>underlined</u>")
    notes = [f"- {line}" for line in (*marks, *(escape(note) for note in table.notes))]
    return "\n".join([*out, *notes]).rstrip() + "\n"


def escape(text: str) -> str:
    """Text that means itself in Markdown, also inside a pipe table."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", " ".join(text.split()))


def table_line(cells: Sequence[str]) -> str:
    """A line of a pipe table."""
    return f"| {' | '.join(cells)} |"


def _cell(printed: Printed, column: int, style: Style) -> str:
    cell = printed.row.cells[column]
    value, after = spread(cell, style, printed.is_paper)
    if not printed.is_paper and cell.mark:
        value = f"**{value}**" if cell.mark == "best" else f"<u>{value}</u>"
    return f"{value} {after}".strip().replace("[", "\\[").replace("]", "\\]")
