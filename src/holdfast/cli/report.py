"""`holdfast report`: a page and a model card from a run folder."""

from pathlib import Path
from typing import Annotated

from holdfast.cli.options import Arg, Json, Opt
from holdfast.cli.terminal import note, say, say_json


def report(
    runs: Annotated[
        list[Path],
        Arg(help="Run folders, or output folders of an audit or certification.", metavar="RUN ..."),
    ],
    output: Annotated[Path | None, Opt(help="The page; report.html in the first folder.")] = None,
    no_text: Annotated[bool, Opt("--no-text", help="Leave the text of examples out altogether.")] = False,
    json: Json = False,
) -> None:
    """Write report.html, which needs no network and no script, and a model card; several runs stand side by side.

    \b
    Example:
      holdfast report runs/first
      holdfast report runs/first runs/second --output comparison.html
    """
    from holdfast.reporting.page import report as write

    done = write(*runs, output=output, text=not no_text)
    views, cards = done.runs, done.cards
    if json:
        found = [
            {"folder": str(folder), "verdict": view.verdict.standing.name.lower(), "claim": view.claim}
            for folder, view in zip(runs, views, strict=True)
        ]
        written, kept = ([str(card.path) for card in cards if card.written is own] for own in (True, False))
        say_json({"report": str(done.path), "cards": written, "kept": kept, "runs": found})
        return
    for view in views:
        prefix = f"{view.label}: " if len(views) > 1 else ""
        say(f"{prefix}{view.verdict.title}. {view.verdict.reason}")
    say(f"report: {done.path}")
    for card in cards:
        if card.written:
            say(f"model card: {card.path}")
        else:
            note(f"{card.path} holds other text and was left alone")
