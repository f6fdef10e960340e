"""`holdfast ls`: what can be named in a run file or on the command line."""

from __future__ import annotations

import textwrap
from enum import StrEnum
from itertools import zip_longest
from typing import Annotated, Any

import typer

from holdfast.cli.terminal import say, say_json

WIDTH = 118
HEADINGS = ("stage", "passes per step", "side data", "reference")


class Kind(StrEnum):
    """What can be listed."""

    defenses = "defenses"
    judges = "judges"
    majorizers = "majorizers"
    tasks = "tasks"


def ls(
    kind: Annotated[Kind, typer.Argument(help="What to list.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the names that a run file or an option may use.

    \b
    Example:
      holdfast ls defenses
    """
    rows = {
        Kind.defenses: _defenses, Kind.judges: _judges, Kind.majorizers: _majorizers, Kind.tasks: _tasks,
    }[kind]()  # fmt: skip
    if json:
        say_json(rows)
        return
    say("\n".join(_defense_lines(rows) if kind is Kind.defenses else _lines(rows)))


def _lines(rows: list[dict[str, Any]]) -> list[str]:
    width = max(len(row["name"]) for row in rows)
    return [f"{row['name']:<{width}}  {row['summary']}" for row in rows]


def _defense_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Name and summary, and below them the columns stage, passes, side data, reference, each wrapped."""
    indent = max(len(row["name"]) for row in rows) + 2
    columns = {"stages": 17, "passes": 32, "needs": 11, "reference": WIDTH - indent - 60}
    heading = "".join(f"{word:<{width}}" for word, width in zip(HEADINGS, columns.values(), strict=True))
    lines = [f"{'name':<{indent}}{heading.rstrip()}"]
    for row in rows:
        cells = [textwrap.wrap(_joined(row[key]), width - 2, break_on_hyphens=False) for key, width in columns.items()]
        lines += ["", f"{row['name']:<{indent}}{row['summary']}"]
        for parts in zip_longest(*cells, fillvalue=""):
            line = "".join(f"{part:<{width}}" for part, width in zip(parts, columns.values(), strict=True))
            lines.append(" " * indent + line.rstrip())
    return lines


def _joined(value: str | list[str]) -> str:
    return value if isinstance(value, str) else ", ".join(value)


def _defenses() -> list[dict[str, Any]]:
    from dataclasses import asdict

    from holdfast.trainers.hooks import DEFENSES

    return [
        {
            "name": name,
            "summary": cls.summary,
            "stages": list(cls.stages),
            "passes": cls.passes,
            "needs": sorted(cls.needs),
            "reference": cls.reference,
            "fsdp": cls.fsdp,
            "constrains": cls.constrains,
            "options": asdict(cls.Config()),
            "paper": dict(cls.paper),
        }
        for name, cls in DEFENSES.items()
    ]


def _judges() -> list[dict[str, str]]:
    from holdfast.evaluation.judge import JUDGES

    return [{"name": name, "summary": (entry.__doc__ or "").split("\n")[0]} for name, entry in JUDGES.items()]


def _majorizers() -> list[dict[str, str]]:
    from holdfast.constraint.majorizers import MAJORIZERS

    return [{"name": name, "summary": (entry.phi.__doc__ or "").split("\n")[0]} for name, entry in MAJORIZERS.items()]


def _tasks() -> list[dict[str, str]]:
    from holdfast.tasks.task import TASKS

    return [{"name": name, "summary": task.summary, "metric": task.metric} for name, task in TASKS.items()]
