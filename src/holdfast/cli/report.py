"""`holdfast report`: a page and a model card from a run folder; tables and figures from a study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.options import given_options, option_name
from holdfast.cli.report_tables import Format, TableOptions, show_tables
from holdfast.cli.terminal import note, say, say_json
from holdfast.core.errors import ConfigError

OF_TABLES = {
    "form": "--format", "output_dir": "", "table": "", "reported": "", "reported_model": "", "intervals": "",
    "page": "",
}  # fmt: skip
OF_PAGES = ("output", "no_text")


def report(
    context: typer.Context,
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, output folders of an audit or certification, or of a study.", metavar="RUN ..."
        ),
    ],
    output: Annotated[Path | None, typer.Option("--output", help="The page; report.html in the first folder.")] = None,
    no_text: Annotated[bool, typer.Option("--no-text", help="Leave the text of examples out altogether.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
    tables: Annotated[bool, typer.Option("--tables", help="The tables of a study instead of a page.")] = False,
    table: Annotated[list[str] | None, typer.Option("--table", help="Only this table; repeat for more.")] = None,
    form: Annotated[
        Format | None, typer.Option("--format", help="Of tables; --output-dir writes all but terminal by default.")
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", help="Write tables and figures there instead of printing tables.")
    ] = None,
    intervals: Annotated[
        bool, typer.Option("--intervals", help="Show the confidence interval of figures that have one seed.")
    ] = False,
    page: Annotated[
        list[Path] | None,
        typer.Option("--page", help="Rewrite the generated blocks of this Markdown page and its figures; repeatable."),
    ] = None,
    reported: Annotated[
        Path | None, typer.Option("--reported", help="The paper's figures (CSV); HOLDFAST_REPORTED by default.")
    ] = None,
    reported_model: Annotated[
        str | None, typer.Option("--reported-model", help="The paper's model beside one that it does not have.")
    ] = None,
) -> None:
    """Write report.html, which needs no network and no script, and a model card; several runs stand side by side.

    With --tables: main, poison_sweep, sensitivity, quantiles, profiling, primal_dual, antibody and details of a study.

    \b
    Example:
      holdfast report runs/first
      holdfast report runs/first runs/second --output comparison.html
      holdfast report out/study --tables --table main
      holdfast report out/study --tables --output-dir tables
      holdfast report out/study --tables --page results.md
    """
    _require_fitting(given_options(context), tables)
    if tables:
        names, pages = tuple(table or ()), tuple(page or ())
        options = TableOptions(form, output_dir, names, reported, reported_model, intervals, pages)
        show_tables(runs, options, json=json)
        return
    _write_page(runs, output, no_text=no_text, json=json)


def _require_fitting(given: set[str], tables: bool) -> None:
    """Refuses options that would be ignored."""
    foreign = [name for name in (OF_PAGES if tables else OF_TABLES) if name in given]
    if foreign:
        name = OF_TABLES.get(foreign[0]) or option_name(foreign[0])
        raise ConfigError(
            f"{name} belongs to {'a page of runs' if tables else '--tables'}",
            remedy=f"leave {name} out, or {'leave --tables out' if tables else 'add --tables'}",
        )


def _write_page(runs: list[Path], output: Path | None, *, no_text: bool, json: bool) -> None:
    from holdfast.report.card import write_cards
    from holdfast.report.page import FILE_NAME, write_report
    from holdfast.report.read import read_evidence

    evidence = [read_evidence(folder) for folder in runs]
    path = output if output is not None else runs[0] / FILE_NAME
    views = write_report(evidence, path, text=not no_text)
    cards = [card for one in evidence for card in write_cards(one)]
    if json:
        found = [
            {"folder": str(one.folder), "verdict": view.verdict.standing.name.lower(), "claim": view.claim}
            for one, view in zip(evidence, views, strict=True)
        ]
        say_json(
            {
                "report": str(path),
                "cards": [str(card.path) for card in cards if card.written],
                "kept": [str(card.path) for card in cards if not card.written],
                "runs": found,
            }
        )
        return
    for view in views:
        prefix = f"{view.label}: " if len(views) > 1 else ""
        say(f"{prefix}{view.verdict.title}. {view.verdict.reason}")
    say(f"report: {path}")
    for card in cards:
        if card.written:
            say(f"model card: {card.path}")
        else:
            note(f"{card.path} holds other text and was left alone")
