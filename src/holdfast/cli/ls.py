"""`holdfast ls`: what can be named in a run file or on the command line."""

import textwrap
from dataclasses import asdict
from itertools import zip_longest
from typing import Annotated, Any, Literal

from holdfast.cli.options import Arg, Json
from holdfast.cli.terminal import say, say_json

WIDTH = 118
HEADINGS = ("stage", "passes per step", "side data", "reference")
Kind = Literal["defenses", "judges", "majorizers", "tasks"]


KINDS: dict[Kind, str] = {
    "defenses": "what `defense` in a run file may name",
    "judges": "what `screening: {judge: ...}` and `certify --judge` may name",
    "majorizers": "what `constraint: {majorizer: ...}` may name",
    "tasks": "what `task: {name: ...}` may name",
}


def ls(kind: Annotated[Kind | None, Arg(help="What to list.")] = None, json: Json = False) -> None:
    """List the names that a run file or an option may use.

    Without an argument: what can be listed.

    \b
    Example:
      holdfast ls defenses
    """
    rows = [{"name": name, "summary": words} for name, words in KINDS.items()] if kind is None else _rows(kind)
    if json:
        say_json(rows)
    elif kind == "defenses":
        say("\n".join(_defense_lines(rows)))
    else:
        width = max(len(row["name"]) for row in rows)
        say("\n".join(f"{row['name']:<{width}}  {row['summary']}" for row in rows))
    if kind is None and not json:
        say("holdfast ls NAME lists one of them. The report of a finished run: holdfast report RUN")


def _defense_lines(rows: list[dict[str, Any]]) -> list[str]:
    indent = max(len(row["name"]) for row in rows) + 2
    columns = {"stages": 17, "passes": 32, "needs": 11, "reference": WIDTH - indent - 60}
    heading = "".join(f"{word:<{width}}" for word, width in zip(HEADINGS, columns.values(), strict=True))
    lines = [f"{'name':<{indent}}{heading.rstrip()}"]

    def text(value: str | list[str]) -> str:
        return value if isinstance(value, str) else ", ".join(value)

    for row in rows:
        cells = [textwrap.wrap(text(row[key]), width - 2, break_on_hyphens=False) for key, width in columns.items()]
        lines += ["", f"{row['name']:<{indent}}{row['summary']}"]
        for parts in zip_longest(*cells, fillvalue=""):
            line = "".join(f"{part:<{width}}" for part, width in zip(parts, columns.values(), strict=True))
            lines.append(" " * indent + line.rstrip())
    return lines


def _rows(kind: Kind) -> list[dict[str, Any]]:
    def summary(documented: Any) -> str:
        return (documented.__doc__ or "").split("\n")[0]

    if kind == "judges":
        from holdfast.judging.judge import JUDGES

        return [{"name": name, "summary": summary(judge)} for name, judge in JUDGES.items()]
    if kind == "majorizers":
        from holdfast.constraint.majorizers import MAJORIZERS

        return [{"name": name, "summary": summary(majorizer.phi)} for name, majorizer in MAJORIZERS.items()]
    if kind == "tasks":
        from holdfast.data.tasks import TASKS

        return [{"name": name, "summary": task.summary, "metric": task.metric} for name, task in TASKS.items()]
    from holdfast.training.hooks import DEFENSES

    return [
        {
            "name": name, "summary": cls.summary, "stages": list(cls.stages), "passes": cls.passes,
            "needs": sorted(cls.needs), "reference": cls.reference, "fsdp": cls.fsdp, "deepspeed": cls.deepspeed,
            "constrains": cls.constrains, "options": asdict(cls.Config()), "paper": dict(cls.paper),
        }
        for name, cls in DEFENSES.items()
    ]  # fmt: skip
