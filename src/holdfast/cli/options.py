"""Options that several commands have, which of them were given, and mappings written as key=value."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.core.errors import ConfigError
from holdfast.core.registry import nearest

Arg, Opt = typer.Argument, typer.Option
Json = Annotated[bool, Opt("--json", help="Print the result as JSON.")]
TrustRemoteCode = Annotated[
    bool, Opt("--trust-remote-code", help="Let a model's repository run its code; needs a pinned revision.")
]
RunFile = Annotated[Path, Arg(help="The run file (YAML).", metavar="RUN.yaml")]
Overrides = Annotated[list[str] | None, Arg(help="Values put over the file.", metavar="[key=value ...]")]
SkipBad = Annotated[bool, Opt("--skip-bad", help="Leave out a few malformed rows, named and counted; default: refuse.")]
Revision = Annotated[str | None, Opt(help="Commit, tag or branch of a hub id.")]
DataChoice = Annotated[str | None, Opt(help="Of a hub data set.")]
_TYPED: dict[type, tuple[str, Callable[[str], Any]]] = {
    str: ("text", str), int: ("a whole number", int), float: ("a number", float),
    bool: ("true or false", lambda text: {"true": True, "false": False}[text.lower()]),
}  # fmt: skip
DType = Annotated[str, Opt(help="auto, bfloat16 or float32.")]
Device = Annotated[str | None, Opt(help="cpu, cuda, cuda:1. [default: a GPU where there is one]")]


def given_options(context: typer.Context) -> set[str]:
    """Names of the parameters that the user wrote, also where the value is the default."""
    return {name for name in context.params if getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"}


def written(names: Iterable[str]) -> str:
    """Parameters as they are written on the command line."""
    spelled = {"run": "RUN", "settings": "--set"}
    return ", ".join(spelled.get(name, f"--{name.replace('_', '-')}") for name in names)


def settings_from(pairs: Sequence[str] | None, known: Mapping[str, type]) -> dict[str, Any]:
    """`--set key=value`, repeated, each value as the type of its key; `columns.ours=theirs` under `columns`."""
    found: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if equals and key.startswith("columns.") and value:
            found.setdefault("columns", {})[key.removeprefix("columns.")] = value
        elif not equals or key not in known:
            raise ConfigError(f"--set {pair}: no such setting", remedy=nearest(key, [*known, "columns.prompt"]))
        else:
            expected, read = _TYPED[known[key]]
            try:
                found[key] = read(value)
            except (ValueError, KeyError):
                raise ConfigError(f"--set {pair}: expected {expected}", remedy=f"write {expected}") from None
    return found


def column_mapping(pairs: Sequence[str] | None, option: str) -> dict[str, str] | None:
    """`ours=theirs`, the values of a repeated option, as a mapping; None where there is none."""
    found = dict(pair.partition("=")[::2] for pair in pairs or ())
    if not all(ours and theirs for ours, theirs in found.items()):
        given = " ".join(f"{option} {pair}" for pair in pairs or ())
        raise ConfigError(f"{given}: expected ours=theirs", remedy=f"for example {option} prompt=question")
    return found or None


def engine_options(pairs: list[str] | None) -> dict[str, Any]:
    """`key=value`, repeated, as a mapping; numbers and true/false as such."""
    from holdfast.records.yaml_file import parse_yaml

    found: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--engine-option {pair!r}: expected key=value", remedy="for example base_url=http://...")
        found[key] = parse_yaml(text, f"--engine-option {pair}")
    return found
