"""Reading options: which were given, what they are called, and mappings written as ours=theirs."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from holdfast.core.errors import ConfigError


def given_options(context: typer.Context) -> set[str]:
    """Names of the parameters that the user wrote, also where the value is the default."""
    return {name for name in context.params if getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"}


def option_name(name: str) -> str:
    """A parameter as it is written on the command line."""
    return "RUN" if name == "run" else f"--{name.replace('_', '-')}"


def column_mapping(pairs: Sequence[str] | None) -> dict[str, str] | None:
    """`--columns ours=theirs`, repeated, as a mapping; None where there is none."""
    found = dict(pair.partition("=")[::2] for pair in pairs or ())
    if any(not ours or not theirs for ours, theirs in found.items()):
        written = " ".join(f"--columns {pair}" for pair in pairs or ())
        raise ConfigError(f"{written}: expected ours=theirs", remedy="for example --columns prompt=question")
    return found or None
