"""Complaints about the command line quote what was typed: they are cleaned and redacted like every other line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typer.core import TyperGroup

from holdfast.cli.terminal import shown


class Commands(TyperGroup):
    """The group of commands, whose usage errors hold no secret."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Parse the group's own options."""
        with _redacted():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        """Parse and run the command."""
        with _redacted():
            return super().invoke(ctx)


@contextmanager
def _redacted() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # A ClickException, which typer takes from click or brings along, depending on its version.
        if hasattr(error, "format_message") and hasattr(error, "message"):
            error.message = shown(str(error.message))
        raise
