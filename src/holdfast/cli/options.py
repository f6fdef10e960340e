"""Reading options: which were given, what they are called, and mappings written as ours=theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from holdfast.core.errors import ConfigError
from holdfast.core.registry import nearest


def given_options(context: typer.Context) -> set[str]:
    """Names of the parameters that the user wrote, also where the value is the default."""
    return {name for name in context.params if getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"}


def option_name(name: str) -> str:
    """A parameter as it is written on the command line."""
    return "RUN" if name == "run" else "--set" if name == "settings" else f"--{name.replace('_', '-')}"


def column_mapping(pairs: Sequence[str] | None) -> dict[str, str] | None:
    """`--columns ours=theirs`, repeated, as a mapping; None where there is none."""
    found = dict(pair.partition("=")[::2] for pair in pairs or ())
    if any(not ours or not theirs for ours, theirs in found.items()):
        written = " ".join(f"--columns {pair}" for pair in pairs or ())
        raise ConfigError(f"{written}: expected ours=theirs", remedy="for example --columns prompt=question")
    return found or None


def settings_from(pairs: Sequence[str] | None, known: Mapping[str, type]) -> dict[str, Any]:
    """`--set key=value`, repeated, each value as the type of its key; `columns.ours=theirs` under `columns`."""
    found: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if equals and key.startswith("columns.") and value:
            found.setdefault("columns", {})[key.removeprefix("columns.")] = value
            continue
        if not equals or key not in known:
            raise ConfigError(f"--set {pair}: no such setting", remedy=nearest(key, [*known, "columns.prompt"]))
        found[key] = _typed(pair, value, known[key])
    return found


def _typed(pair: str, value: str, kind: type) -> Any:
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise ConfigError(f"--set {pair}: expected true or false", remedy="write true or false")
        return value.lower() == "true"
    try:
        return kind(value)
    except ValueError:
        words = {int: "a whole number", float: "a number"}
        raise ConfigError(f"--set {pair}: expected {words[kind]}", remedy="correct the value") from None
