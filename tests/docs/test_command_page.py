"""docs/commands.md is what the commands say of themselves."""

from __future__ import annotations

from typing import Annotated

import typer
from tools import command_page

COMMANDS = command_page.commands()


def test_the_page_is_current():
    assert command_page.PAGE.read_text(encoding="utf-8") == command_page.page(), "python -m tools.command_page"


def test_every_command_and_option_of_it_has_a_text():
    sections = command_page.page().split("\n## holdfast ")[1:]
    assert [section.splitlines()[0] for section in sections] == list(COMMANDS)
    for section, (name, command) in zip(sections, COMMANDS.items(), strict=True):
        for one in (parameter for parameter in command.params if not parameter.hidden):
            assert one.help, f"{name}: {one.name}"
            assert one.opts[0] in section or not one.opts[0].startswith("-"), f"{name}: {one.opts}"


def test_what_an_option_takes_and_its_default_are_said(monkeypatch):
    app = typer.Typer()

    @app.command()
    def measure(
        count: Annotated[int, typer.Argument(help="How many.")],
        rate: Annotated[float, typer.Option(help="A < B. [default: from the table]")] = 0.5,
        name: Annotated[list[str] | None, typer.Option(help="Of `a_b*`.")] = None,
        fast: Annotated[bool, typer.Option("--fast", help="Fewer.")] = False,
    ) -> None:
        """Count once.

        \b
        Example:
          holdfast measure 3
        """

    @app.command()
    def other() -> None:
        """Nothing."""

    monkeypatch.setattr(command_page, "app", app)
    assert command_page.page().endswith(
        "## holdfast measure\n\nCount once.\n\n```\nholdfast measure COUNT [options]\n```\n\n"
        "* `COUNT`: How many.\n"
        "* `--rate` (number; default: from the table): A \\< B.\n"
        "* `--name` (text; may be repeated): Of `a_b*`.\n"
        "* `--fast`: Fewer.\n\n"
        "Example:\n\n```\nholdfast measure 3\n```\n\n"
        "## holdfast other\n\nNothing.\n\n```\nholdfast other\n```\n"
    )
