"""The formats of a table: Markdown, LaTeX with booktabs, plain text for the terminal, CSV and JSON.

Markdown and LaTeX set the best figure in bold and underline the second best; text marks them with `*` and `°`. Under a
row stand the paper's figures where there are any.
"""

import csv
import io
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

from holdfast_lab.tables.results import one_line
from holdfast_lab.tables.table import MISSING, Cell, Column, Mark, Published, Row, Section, Table

ARROWS = {"lower": "↓", "higher": "↑", None: ""}
PAPER = "paper"
PrintCell = Callable[[str, str, Mark | None], str]  # from value, what follows it, and mark


@dataclass(frozen=True)
class Style:
    """Settings of all formats; `intervals` shows the confidence interval of figures of one seed."""

    intervals: bool = False


def printed_rows(
    section: Section, style: Style, label: Callable[[str], str], paper: str, show: PrintCell
) -> Iterator[tuple[Row, list[str]]]:
    """Every row as printed, label first; beneath it, with the label `paper`, the paper's figures where it has any."""
    for row in section.rows:
        yield row, [label(row.label), *(show(*spread(cell, style), cell.mark) for cell in row.cells)]
        if any(cell.published for cell in row.cells):
            yield row, [paper, *(show(*_with_std(cell, cell.published, ""), None) for cell in row.cells)]


def spread(cell: Cell, style: Style) -> tuple[str, str]:
    """(value, what follows it): the value or `-`, and its `± std` or interval without the sign between."""
    value, after = _with_std(cell, cell, MISSING)
    if not after and style.intervals and cell.low is not None and cell.high is not None:
        after = f"[{cell.text(cell.low)}, {cell.text(cell.high)}]"
    return value, after


def _with_std(cell: Cell, figure: Cell | Published | None, missing: str) -> tuple[str, str]:
    if figure is None or figure.mean is None:
        return missing, ""
    return cell.text(figure.mean), "" if figure.std is None else f"± {cell.text(figure.std)}"


def column_title(column: Column) -> str:
    return f"{column.shown.title} {ARROWS[column.shown.better]}".strip()


def groups(table: Table) -> list[tuple[str, list[int]]]:
    """Neighbouring columns under one heading: (heading, column numbers)."""
    grouped = groupby(range(len(table.columns)), key=lambda number: table.columns[number].group)
    return [(name, list(members)) for name, members in grouped]


def legend(table: Table, best: str, second: str) -> list[str]:
    """What the marks mean, for those that occur: `best` and `second` are how a format shows them."""
    marks = {cell.mark for cell in table.cells} - {None}
    words = [f"{best} best", f"{second} second best"][: len(marks)]
    return [", ".join(words)] if words else []


def section_heading(table: Table, section: Section) -> str:
    """A section's title; a table of one section has none unless it says something that the table's title does not."""
    return section.title if len(table.sections) > 1 or section.title not in table.title else ""


def markdown(table: Table, style: Style) -> str:
    """One pipe table a section, with the title as a heading and the notes as a list."""
    out = [f"### {escape_markdown(table.title)}", ""]
    titles = [escape_markdown(f"{column.group} {column_title(column)}".strip()) for column in table.columns]
    for section in table.sections:
        title = section_heading(table, section)
        out += [f"**{escape_markdown(title)}**", ""] if title else []
        out += [table_line([escape_markdown(table.head), *titles]), table_line(["---", *["---:"] * len(titles)])]
        rows = printed_rows(section, style, escape_markdown, f"&nbsp;&nbsp;*{PAPER}*", _markdown_cell)
        out += [*(table_line(cells) for _, cells in rows), ""]
    marks = legend(table, "**bold**", "<u>underlined</u>")
    notes = [f"- {line}" for line in (*marks, *(escape_markdown(note) for note in table.notes))]
    return "\n".join([*out, *notes]).rstrip() + "\n"


def escape_markdown(text: str) -> str:
    """Text that means itself in Markdown, also inside a pipe table."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", " ".join(text.split()))


def table_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown_cell(value: str, after: str, mark: Mark | None) -> str:
    value = {"best": f"**{value}**", "second": f"<u>{value}</u>", None: value}[mark]
    return f"{value} {after}".strip().replace("[", "\\[").replace("]", "\\]")


TEXT_MARKS = {"best": "*", "second": "°", None: " "}
GAP = "  "


def text(table: Table, style: Style, *, width: int = 100) -> str:
    """The table in lines of at most `width` characters where its columns allow it, stacked where it is too wide."""
    sections = [
        [cells for _, cells in printed_rows(section, style, str, f"  {PAPER}", _text_cell)]
        for section in table.sections
    ]
    titles = [table.head, *(column_title(column) for column in table.columns)]
    labels, *widths = (max(map(len, column)) for column in zip(titles, *chain(*sections), strict=True))
    out = [table.title]
    for stack in _stacks(table, widths, width - labels):
        total = labels + sum(len(GAP) + widths[j] for j in stack)
        out += ["", *_headings(table, stack, labels, widths)]
        for section, printed in zip(table.sections, sections, strict=True):
            title = section_heading(table, section)
            out.append(f"── {title} ".ljust(total, "─") if title else "─" * total)
            for label, *cells in printed:
                out.append(label.ljust(labels) + "".join(GAP + cells[j].ljust(widths[j]) for j in stack))
    wrapper = textwrap.TextWrapper(
        max(width, 40), initial_indent="  ", subsequent_indent="    ", break_long_words=False
    )
    if notes := [*legend(table, "*", "°"), *table.notes]:
        out += ["", *chain(*map(wrapper.wrap, notes))]
    return "\n".join(line.rstrip() for line in out) + "\n"


def _text_cell(value: str, after: str, mark: Mark | None) -> str:
    return f"{value}{TEXT_MARKS[mark]}{after}".rstrip()


def _stacks(table: Table, widths: list[int], width: int) -> list[list[int]]:
    """Columns side by side as far as the width goes; those under one heading stay together."""
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


def _headings(table: Table, columns: list[int], labels: int, widths: list[int]) -> list[str]:
    lines = []
    if any(table.columns[j].group for j in columns):
        heading = " " * labels
        for name, members in groups(table):
            if inside := [j for j in members if j in columns]:
                heading += GAP + name.center(sum(widths[j] + len(GAP) for j in inside) - len(GAP), "─")
        lines.append(heading)
    titles = (GAP + column_title(table.columns[j]).ljust(widths[j]) for j in columns)
    return [*lines, table.head.ljust(labels) + "".join(titles)]


LATEX_ESCAPES = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "×": r"$\times$", "±": r"$\pm$", "−": "$-$", "°": r"$^\circ$",
}  # fmt: skip
LATEX_ARROWS = {"lower": r" $\downarrow$", "higher": r" $\uparrow$", None: ""}


def latex(table: Table, style: Style) -> str:
    """A complete table environment; needs the packages booktabs and graphicx."""
    marks = legend(table, r"\textbf{Bold}", r"\underline{underlined}")
    notes = (escape_latex(note[:1].upper() + note[1:]) for note in table.notes)
    caption = " ".join(f"{sentence}." for sentence in (escape_latex(table.title), *marks, *notes))
    body = "\n".join(f"    {line}" for line in (*_latex_head(table), *_latex_body(table, style)))
    return rf"""% \usepackage{{booktabs,graphicx}}
\begin{{table*}}[t]
  \centering
  \small
  \caption{{{caption}}}
  \label{{tab:{re.sub(r"[^A-Za-z0-9.-]", "-", table.slug)}}}
  \resizebox{{\ifdim\width>\textwidth\textwidth\else\width\fi}}{{!}}{{%
  \begin{{tabular}}{{l{"c" * len(table.columns)}}}
{body}
  \end{{tabular}}}}
\end{{table*}}
"""


def escape_latex(text: str) -> str:
    """Text that means itself in LaTeX; control characters and line breaks become spaces."""
    return "".join(LATEX_ESCAPES.get(character, character) for character in one_line(text))


def _latex_head(table: Table) -> list[str]:
    lines = [r"\toprule"]
    grouped = groups(table)
    if any(name for name, _ in grouped):
        cells = [rf"\multicolumn{{{len(members)}}}{{c}}{{{escape_latex(name)}}}" for name, members in grouped]
        rules = "".join(rf"\cmidrule(lr){{{members[0] + 2}-{members[-1] + 2}}}" for name, members in grouped if name)
        lines += [_latex_line(["", *cells]), rules]
    return [*lines, _latex_line([escape_latex(table.head), *(_latex_title(column) for column in table.columns)])]


def _latex_body(table: Table, style: Style) -> list[str]:
    lines = []
    for section in table.sections:
        lines.append(r"\midrule")
        if title := section_heading(table, section):
            heading = rf"\multicolumn{{{len(table.columns) + 1}}}{{l}}{{\textit{{{escape_latex(title)}}}}} \\"
            lines += [heading, r"\midrule"]
        rows = printed_rows(section, style, escape_latex, rf"\quad \textit{{{PAPER}}}", _latex_cell)
        for is_reference, found in groupby(rows, key=lambda printed: printed[0].is_reference):
            if not is_reference and section.rows[0].is_reference:
                lines.append(r"\midrule")
            lines += [_latex_line(cells) for _, cells in found]
    return [*lines, r"\bottomrule"]


def _latex_title(column: Column) -> str:
    name = column.shown.title
    stem, _, index = name.partition("_q")
    shown = rf"{escape_latex(stem)}$_{{q{index}}}$" if index.isalnum() and stem == "HS" else escape_latex(name)
    return shown + LATEX_ARROWS[column.shown.better]


def _latex_cell(value: str, after: str, mark: Mark | None) -> str:
    value = {"best": rf"\textbf{{{value}}}", "second": rf"\underline{{{value}}}", None: value}[mark]
    if value == MISSING:
        return "--"
    if after.startswith("± "):
        return rf"{value}\,{{\tiny$\pm${after[2:]}}}"
    return rf"{value}\,{{\tiny {after}}}" if after else value


def _latex_line(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


COLUMNS = ("table", "model", "task", "poison_ratio", "method", "setting", "metric", "mean", "std", "n_seeds")
INTERVAL = ("low", "high")
PUBLISHED = ("paper_mean", "paper_std")
ANY = "any"  # the references do not depend on the poison ratio


def records(table: Table) -> list[dict[str, object]]:
    """One record a figure, missing ones with mean None; a reference that stands under several ratios comes once."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for section, row, cell in ((s, r, cell) for s in table.sections for r in s.rows for cell in r.cells):
        ratio = ANY if row.is_reference else cell.poison_ratio
        key = (table.name, section.model, cell.task, ratio, row.label, row.setting, cell.metric)
        paper = cell.published
        record = dict(zip(COLUMNS, key, strict=False)) | {
            "mean": cell.mean, "std": cell.std, "n_seeds": cell.seeds, "low": cell.low, "high": cell.high,
            "mark": cell.mark, "paper_mean": paper and paper.mean, "paper_std": paper and paper.std,
        }  # fmt: skip
        # A default whose values are unknown is in every section of a sweep, on that section's seeds.
        found.setdefault((*key, section.title), record)
    return list(found.values())


def long_form(tables: Sequence[Table], style: Style) -> str:
    """CSV of one figure a row, in the columns of the paper's reported figures; intervals and the paper's if any."""
    published = any(table.has_published for table in tables)
    columns = [*COLUMNS, *(INTERVAL if style.intervals else ()), *(PUBLISHED if published else ())]
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for table in tables:
        for record in records(table):
            writer.writerow({k: f"{v:.10g}" if isinstance(v, float) else v for k, v in record.items()})
    return out.getvalue()
