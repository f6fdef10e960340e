"""`holdfast tables FOLDER`: a study's tables on the terminal, or as files with the figures."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from holdfast.cli.options import Json, Opt
from holdfast.cli.terminal import note, say, say_json
from holdfast.core.errors import ConfigError

if TYPE_CHECKING:
    from holdfast_lab.tables.formats import Style
    from holdfast_lab.tables.reported import Reported
    from holdfast_lab.tables.results import Result
    from holdfast_lab.tables.table import Table

NAMED = 5  # cells named in a note before it says how many more
Format = Literal["terminal", "markdown", "latex", "csv"]
SUFFIXES: dict[Format, str] = {"terminal": "txt", "markdown": "md", "latex": "tex", "csv": "csv"}
WRITTEN: tuple[Format, ...] = ("markdown", "latex", "csv")  # by --output where no --format is given


def tables(
    folders: Annotated[list[Path], typer.Argument(help="Output folders of studies.", metavar="STUDY ...")],
    table: Annotated[list[str] | None, Opt(help="Only this table; repeat for more.")] = None,
    form: Annotated[
        Format | None, Opt("--format", help="Of tables; --output writes all but terminal by default.")
    ] = None,
    output_dir: Annotated[
        Path | None, Opt("--output", "--output-dir", help="Write tables and figures there instead of printing tables.")
    ] = None,
    intervals: Annotated[
        bool, Opt("--intervals", help="Show the confidence interval of figures that have one seed.")
    ] = False,
    reported: Annotated[Path | None, Opt(help="The paper's figures (CSV); HOLDFAST_REPORTED by default.")] = None,
    reported_model: Annotated[str | None, Opt(help="The paper's model beside one that it does not have.")] = None,
    json: Json = False,
) -> None:
    """Print a study's tables.

    They are main, poison_sweep, sensitivity, quantiles, profiling, primal_dual, antibody and details.

    \b
    Example:
      holdfast tables out/study --table main
      holdfast tables out/study --output tables
    """
    from holdfast_lab.tables.formats import Style, records
    from holdfast_lab.tables.kinds import build, left_out
    from holdfast_lab.tables.reported import beside, find_reported
    from holdfast_lab.tables.results import read_results

    results = read_results(*folders)
    paper = find_reported(reported, reported_model)
    made = build(results, table or ())
    made = made if paper is None else [beside(one, paper) for one in made]
    style = Style(intervals=intervals)
    files = _write(output_dir, results, made, style, form) if output_dir else []
    left = [] if table else left_out(results, made)
    if json:
        listed = [{
            "name": one.name, "slug": one.slug, "title": one.title, "figures": records(one), "notes": list(one.notes)
        } for one in made]  # fmt: skip
        say_json({"tables": listed, "files": list(map(str, files)), "left_out": left})
    elif files:
        say("\n".join(map(str, files)))
    else:
        width = shutil.get_terminal_size((100, 40)).columns
        say(_rendered(made, style, form or "terminal", width).rstrip("\n"))
    _note_gaps(folders, left, made, paper)


def _rendered(tables: Sequence[Table], style: Style, form: Format, width: int) -> str:
    from holdfast_lab.tables.formats import latex, long_form, markdown, text

    if form == "csv":
        return long_form(tables, style)
    if form == "terminal":
        return "\n".join(text(table, style, width=width) for table in tables)
    return "\n".join((markdown if form == "markdown" else latex)(table, style) for table in tables)


def _write(
    folder: Path, results: Sequence[Result], tables: Sequence[Table], style: Style, form: Format | None
) -> list[Path]:
    from holdfast.core.files import write_bytes
    from holdfast_lab.tables.figures import figures

    forms = (form,) if form is not None else WRITTEN
    content = {
        f"{table.slug}.{SUFFIXES[one]}": _rendered([table], style, one, width=160).encode()
        for table in tables
        for one in forms
    }
    for picture in figures(results):
        content |= {f"{picture.name}.svg": picture.svg, f"{picture.name}.png": picture.png}
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {folder} is a file, expected a folder", remedy="name another folder")
    for name, data in content.items():
        write_bytes(folder / name, data)
    return [folder / name for name in content]


def _note_gaps(
    folders: Sequence[Path], left: Sequence[str], tables: Sequence[Table], reported: Reported | None
) -> None:
    from holdfast_lab.tables.results import failed_cells

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
        note(f"note: the paper has no {', '.join(alone)}; --reported-model chooses what it is compared with: {known}")


def _listed(cells: Sequence[str]) -> str:
    rest = f" and {len(cells) - NAMED} more" if len(cells) > NAMED else ""
    return ", ".join(cells[:NAMED]) + rest
