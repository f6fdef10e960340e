"""docs/commands.md: every command with its arguments and options, written from the commands themselves.

python -m tools.command_page     rewrites the page; a test compares them.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from pathlib import Path
from textwrap import fill
from typing import Any

import typer

from holdfast.cli.main import app

PAGE = Path(__file__).parent.parent / "docs" / "commands.md"
HEAD = """\
# Commands

<!-- Written from the commands by `python -m tools.command_page`; do not edit. -->

What `holdfast COMMAND --help` prints. In brackets: what an option takes, and its default. What the exit codes mean:
[getting started](getting-started.md#exit-codes).
"""
_KINDS = {str: "text", int: "whole number", float: "number", Path: "path"}
_STATED = re.compile(r"\s*\[default: (.*?)\]")  # a default that depends on something, said in the help text
_MARKUP = re.compile(r"([<*])")


def commands() -> dict[str, Any]:
    """Every command by the words that call it, in the order of `holdfast --help`."""
    found: dict[str, Any] = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found |= {name: command} if inner is None else {f"{name} {word}": one for word, one in inner.items()}
    return found


def page() -> str:
    """The whole page."""
    listed = commands()
    rows = [f"| {_link(name)} | {_cell(_help(command)[0][0])} |" for name, command in listed.items()]
    table = "\n".join(["| command | what it does |", "|---|---|", *rows])
    return "\n\n".join([HEAD.strip(), table, *(_section(*item) for item in listed.items())]) + "\n"


def _link(name: str) -> str:
    return f"[{name}](#holdfast-{name.replace(' ', '-')})"


def _section(name: str, command: Any) -> str:
    texts, examples = _help(command)
    kinds = _kinds(command)
    shown = [one for one in command.params if not one.hidden]
    arguments = [_argument(one) for one in shown if _is_argument(one)]
    usage = " ".join(["holdfast", name, *arguments, *(["[options]"] if len(shown) > len(arguments) else [])])
    entries = "\n".join(_entry(one, kinds.get(one.name, "")) for one in shown)
    return "\n\n".join([f"## holdfast {name}", *texts, f"```\n{usage}\n```", *filter(None, [entries]), *examples])


def _help(command: Any) -> tuple[list[str], list[str]]:
    """Paragraphs of a command's help, and the parts that are set as they stand, each with its title."""
    prose, *verbatim = inspect.cleandoc(command.help or "").split("\b")
    texts = [_filled(_prose(part)) for part in re.split(r"\n\s*\n", prose) if part.strip()]
    examples = []
    for part in verbatim:
        title, _, body = part.strip("\n").partition("\n")
        examples.append(f"{_filled(_prose(title))}\n\n```\n{inspect.cleandoc(body)}\n```")
    return texts, examples


def _kinds(command: Any) -> dict[str, str]:
    """What each parameter takes, in words, from the types of the command's function."""
    hints = typing.get_type_hints(inspect.unwrap(command.callback))
    return {name: _kind(hint) for name, hint in hints.items()}


def _kind(hint: Any) -> str:
    inner = [one for one in typing.get_args(hint) if one is not types.NoneType]
    if typing.get_origin(hint) in (list, types.UnionType, typing.Union) and inner:
        return _kind(inner[0])
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(f"`{one}`" for one in inner)
    return _KINDS.get(hint, "")


def _is_argument(parameter: Any) -> bool:
    return not parameter.opts[0].startswith("-")


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name.upper()).strip("[]")
    return name if parameter.required else f"[{name}]"


def _entry(parameter: Any, kind: str) -> str:
    """An argument or option: how it is written, what it takes, its default and its help."""
    spelled = [_argument(parameter)] if _is_argument(parameter) else [*parameter.opts, *parameter.secondary_opts]
    takes = "" if _is_argument(parameter) or getattr(parameter, "is_flag", False) else kind
    many = "may be repeated" if parameter.multiple else ""
    stated = "; ".join(filter(None, [takes, many, _default(parameter)]))
    meaning = _prose(_STATED.sub("", parameter.help or ""))
    text = f"* {', '.join(f'`{one}`' for one in spelled)}{f' ({stated})' if stated else ''}: {meaning}"
    return fill(text, 116, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _default(parameter: Any) -> str:
    if stated := _STATED.search(parameter.help or ""):
        return f"default: {stated[1]}"
    if parameter.required and not _is_argument(parameter):
        return "required"
    value = parameter.default
    return "" if value is None or isinstance(value, bool) or value in ((), [], "") else f"default: `{value}`"


def _prose(text: str) -> str:
    """Help as Markdown: signs of markup are escaped, but not within code."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part if i % 2 else _MARKUP.sub(r"\\\1", part) for i, part in enumerate(parts))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _filled(text: str) -> str:
    return fill(text, 118, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
