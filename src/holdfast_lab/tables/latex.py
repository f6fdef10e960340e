"""A table in LaTeX with booktabs: best in bold, second best underlined, every label escaped."""

from __future__ import annotations

import re

from holdfast_lab.tables.layout import PAPER, Printed, Style, groups, legend, printed_rows, section_heading, spread
from holdfast_lab.tables.table import Column, Table

ESCAPES = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "×": r"$\times$", "±": r"$\pm$", "−": "$-$", "°": r"$^\circ$",
}  # fmt: skip
ARROWS = {"lower": r" $\downarrow$", "higher": r" $\uparrow$", None: ""}


def latex(table: Table, style: Style) -> str:
    """A complete table environment; needs the packages booktabs and graphicx."""
    marks = legend(table, r"\textbf{Bold}", r"\underline{underlined}")
    sentences = [escape(table.title), *marks, *(escape(note[:1].upper() + note[1:]) for note in table.notes)]
    body = "\n".join(f"    {line}" for line in (*_head(table), *_body(table, style)))
    return rf"""% \usepackage{{booktabs,graphicx}}
\begin{{table*}}[t]
  \centering
  \small
  \caption{{{" ".join(f"{sentence}." for sentence in sentences)}}}
  \label{{tab:{re.sub(r"[^A-Za-z0-9.-]", "-", table.slug)}}}
  \resizebox{{\ifdim\width>\textwidth\textwidth\else\width\fi}}{{!}}{{%
  \begin{{tabular}}{{l{"c" * len(table.columns)}}}
{body}
  \end{{tabular}}}}
\end{{table*}}
"""


def escape(text: str) -> str:
    """Text that means itself in LaTeX; control characters and line breaks become spaces."""
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return "".join(ESCAPES.get(character, character) for character in flat)


def _head(table: Table) -> list[str]:
    lines = [r"\toprule"]
    grouped = groups(table)
    if any(name for name, _ in grouped):
        cells = [rf"\multicolumn{{{len(members)}}}{{c}}{{{escape(name)}}}" for name, members in grouped]
        rules = "".join(rf"\cmidrule(lr){{{members[0] + 2}-{members[-1] + 2}}}" for name, members in grouped if name)
        lines += [_line(["", *cells]), rules]
    return [*lines, _line([escape(table.head), *(_title(column) for column in table.columns)])]


def _body(table: Table, style: Style) -> list[str]:
    lines = []
    for section in table.sections:
        lines.append(r"\midrule")
        title = section_heading(table, section)
        if title:
            lines += [rf"\multicolumn{{{len(table.columns) + 1}}}{{l}}{{\textit{{{escape(title)}}}}} \\", r"\midrule"]
        before = True
        for printed in printed_rows(section):
            if before and not printed.row.is_reference and printed.row is not section.rows[0]:
                lines.append(r"\midrule")
            before = printed.row.is_reference
            label = rf"\quad \textit{{{PAPER}}}" if printed.is_paper else escape(printed.row.label)
            lines.append(_line([label, *(_cell(printed, j, style) for j in range(len(table.columns)))]))
    return [*lines, r"\bottomrule"]


def _title(column: Column) -> str:
    name = column.shown.title
    stem, _, index = name.partition("_q")
    shown = rf"{escape(stem)}$_{{q{index}}}$" if index.isalnum() and stem == "HS" else escape(name)
    return shown + ARROWS[column.shown.better]


def _cell(printed: Printed, column: int, style: Style) -> str:
    cell = printed.row.cells[column]
    value, after = spread(cell, style, printed.is_paper)
    if not printed.is_paper and cell.mark:
        value = rf"\textbf{{{value}}}" if cell.mark == "best" else rf"\underline{{{value}}}"
    if value == "-":
        return "--"
    if after.startswith("± "):
        return rf"{value}\,{{\tiny$\pm${after[2:]}}}"
    return rf"{value}\,{{\tiny {after}}}" if after else value


def _line(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"
