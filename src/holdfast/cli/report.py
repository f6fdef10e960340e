"""`holdfast report`: a page and a model card from a run folder."""

from pathlib import Path
from typing import Annotated

from holdfast.cli.options import Arg, Json, Opt
from holdfast.cli.terminal import note, say, say_json
from holdfast.core.errors import ConfigError


def report(
    runs: Annotated[list[Path], Arg(help="Runs, or output folders of an audit or certification.", metavar="RUN ...")],
    output: Annotated[
        Path | None,
        Opt(help="The page. [default: report.html in the folder; of several runs comparison.html in the first]"),
    ] = None,
    no_text: Annotated[bool, Opt("--no-text", help="Leave the text of examples out altogether.")] = False,
    open_page: Annotated[bool, Opt("--open", help="Open the page in the browser.")] = False,
    push_to_hub: Annotated[
        str | None, Opt(help="Upload the trained weights with the card to this repository.", metavar="OWNER/NAME")
    ] = None,
    private: Annotated[bool, Opt("--private", help="With --push-to-hub: make a new repository private.")] = False,
    json: Json = False,
) -> None:
    """Write report.html and a model card.

    The page needs no network and no script; several runs stand side by side in comparison.html. Nothing leaves this
    machine without --push-to-hub, and then only weights, tokenizer and card.

    \b
    Example:
      holdfast report runs/first --open
      holdfast report runs/first runs/second
      holdfast report runs/first --push-to-hub owner/name
    """
    from holdfast.reporting.page import report as write

    if private and push_to_hub is None:
        raise ConfigError("--private without --push-to-hub", remedy="add --push-to-hub OWNER/NAME, or leave it out")
    if push_to_hub is not None and len(runs) > 1:
        raise ConfigError(f"--push-to-hub with {len(runs)} runs", remedy="name the one run that is to be pushed")
    done = write(*runs, output=output, text=not no_text)
    views, cards = done.runs, done.cards
    if open_page:
        show_page(done.path)
    address = None
    if push_to_hub is not None:
        from holdfast.reporting.card import push_to_hub as push

        address = push(runs[0], push_to_hub, private=private)
    if json:
        found = [{"folder": str(folder), **view.to_json()} for folder, view in zip(runs, views, strict=True)]
        written, kept = ([str(card.path) for card in cards if card.written is own] for own in (True, False))
        pushed = {} if address is None else {"pushed": address}
        say_json({"report": str(done.path), "cards": written, "kept": kept, "runs": found, **pushed})
        return
    for view in views:
        prefix = f"{view.label}: " if len(views) > 1 else ""
        say(f"{prefix}{view.headline}")
        say(f"{prefix}{view.verdict.title}. {view.verdict.reason}")
    say(f"report: {done.path}")
    for card in cards:
        if card.written:
            say(f"model card: {card.path}")
        else:
            note(f"{card.path} holds other text and was left alone")
    if address is not None:
        say(f"pushed: {address}")


def show_page(path: Path) -> None:
    """Open the page in the user's browser; where there is none, say where the page is."""
    import webbrowser

    address = path.resolve().as_uri()
    try:
        opened = webbrowser.open(address)
    except webbrowser.Error:
        opened = False
    if not opened:
        note(f"--open: no browser was found on this machine. Copy {path} to one that has, or set BROWSER; {address}")
