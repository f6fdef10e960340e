"""`holdfast report FOLDER --tables`: a study's tables on the terminal, or as files with the figures."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli.terminal import note, say, say_json
from holdfast.core.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.tables.layout import Style
    from holdfast.tables.reported import Reported
    from holdfast.tables.results import Result
    from holdfast.tables.table import Table

REPORTED = "HOLDFAST_REPORTED"
NAMED = 5  # cells named in a note before it says how many more


class Format(StrEnum):
    """How a table is written."""

    terminal = "terminal"
    markdown = "markdown"
    latex = "latex"
    csv = "csv"


SUFFIXES = {Format.terminal: "txt", Format.markdown: "md", Format.latex: "tex", Format.csv: "csv"}
WRITTEN = (Format.markdown, Format.latex, Format.csv)  # by --output-dir where no --format is given


@dataclass(frozen=True)
class TableOptions:
    """What the command line asked for."""

    form: Format | None = None
    output_dir: Path | None = None
    names: Sequence[str] = ()
    reported: Path | None = None
    reported_model: str | None = None
    intervals: bool = False
    pages: Sequence[Path] = ()


def show_tables(folders: Sequence[Path], options: TableOptions, *, json: bool) -> None:
    """Print the tables, or write them with the figures; notes say which results entered no table."""
    from holdfast.tables.agreement import beside
    from holdfast.tables.build import build, left_out
    from holdfast.tables.layout import Style

    results = _read(folders)
    reported = _reported(options)
    if options.pages:
        from holdfast.cli.report_page import write_pages

        _require_page_alone(options)
        write_pages(options.pages, results, reported, json=json)
        return
    built = build(results, options.names)
    tables = built if reported is None else [beside(table, reported) for table in built]
    style = Style(intervals=options.intervals)
    files = _write(options.output_dir, results, tables, style, options.form) if options.output_dir else []
    left = left_out(results, tables) if not options.names else []
    if json:
        say_json({"tables": [_as_json(table) for table in tables], "files": list(map(str, files)), "left_out": left})
    elif files:
        for path in files:
            say(str(path))
    else:
        _print(tables, style, options.form or Format.terminal)
    _note_gaps(folders, left, tables, reported)


def _require_page_alone(options: TableOptions) -> None:
    """A page says itself which tables it has, and how they look."""
    given = {
        "--format": options.form, "--output-dir": options.output_dir, "--table": options.names,
        "--intervals": options.intervals,
    }  # fmt: skip
    if foreign := [name for name, value in given.items() if value]:
        raise ConfigError(f"{foreign[0]} does not go with --page", remedy=f"leave {foreign[0]} or --page out")


def _read(folders: Sequence[Path]) -> list[Result]:
    from holdfast.tables.results import read_results, require_distinct

    results = [result for folder in folders for result in read_results(folder)]
    require_distinct(results)
    return results


def _reported(options: TableOptions) -> Reported | None:
    from holdfast.tables.reported import read_reported

    named = options.reported or (Path(os.environ[REPORTED]) if os.environ.get(REPORTED) else None)
    if named is not None:
        return read_reported(named, options.reported_model)
    if options.reported_model is not None:
        raise ConfigError(
            f"--reported-model {options.reported_model} without reported figures",
            remedy=f"give --reported PATH, or set {REPORTED}",
        )
    return None


def _rendered(tables: Sequence[Table], style: Style, form: Format, width: int) -> str:
    from holdfast.tables.latex import latex
    from holdfast.tables.long_form import long_form
    from holdfast.tables.markdown import markdown
    from holdfast.tables.text import text

    if form is Format.csv:
        return long_form(tables, style)
    if form is Format.terminal:
        return "\n".join(text(table, style, width=width) for table in tables)
    return "\n".join((markdown if form is Format.markdown else latex)(table, style) for table in tables)


def _print(tables: Sequence[Table], style: Style, form: Format) -> None:
    width = shutil.get_terminal_size((100, 40)).columns
    say(_rendered(tables, style, form, width).rstrip("\n"))


def _write(
    folder: Path, results: Sequence[Result], tables: Sequence[Table], style: Style, form: Format | None
) -> list[Path]:
    """One file per table and format, then the figures; everything is made before the first byte is written."""
    from holdfast.core.files import write_bytes
    from holdfast.tables.figures import figures

    forms = (form,) if form is not None else WRITTEN
    content = {
        f"{table.slug}.{SUFFIXES[one]}": _rendered([table], style, one, width=160).encode()
        for table in tables
        for one in forms
    }
    for picture in figures(results):
        content |= {f"{picture.name}.svg": picture.svg, f"{picture.name}.png": picture.png}
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output-dir {folder} is a file, expected a folder", remedy="name another folder")
    for name, data in content.items():
        write_bytes(folder / name, data)
    return [folder / name for name in content]


def _as_json(table: Table) -> dict[str, Any]:
    from holdfast.tables.long_form import records

    return {
        "name": table.name,
        "slug": table.slug,
        "title": table.title,
        "figures": records(table),
        "notes": list(table.notes),
    }


def _note_gaps(
    folders: Sequence[Path], left: Sequence[str], tables: Sequence[Table], reported: Reported | None
) -> None:
    from holdfast.tables.results import failed_cells

    if left:
        note(f"note: {len(left)} results enter no table: {_listed(left)}")
    failed = [cell for folder in folders for cell in failed_cells(folder)]
    if failed:
        note(f"note: {len(failed)} cells of the study failed: {_listed(failed)}")
    if reported is None:
        return
    models = dict.fromkeys(section.model for table in tables for section in table.sections)
    alone = [model for model in models if reported.counterpart(model) is None]
    if alone:
        known = ", ".join(reported.models)
        note(f"note: the paper has no {', '.join(alone)}; --reported-model chooses what stands beside it: {known}")


def _listed(cells: Sequence[str]) -> str:
    rest = f" and {len(cells) - NAMED} more" if len(cells) > NAMED else ""
    return ", ".join(cells[:NAMED]) + rest
