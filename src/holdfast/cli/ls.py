"""`holdfast ls`: what can be named in a run file or on the command line."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from holdfast.cli.terminal import say, say_json


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
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        say(f"{row['name']:<{width}}  {row['summary']}")


def _defenses() -> list[dict[str, str]]:
    from holdfast.trainers.hooks import DEFENSES

    return [
        {"name": name, "summary": cls.summary, "stage": str(cls.stage), "passes": cls.passes}
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
