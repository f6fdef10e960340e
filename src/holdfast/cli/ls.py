"""`holdfast ls`: what can be named in a run file or on the command line."""

import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from itertools import zip_longest
from typing import Annotated, Any, Literal

from holdfast.cli.options import Arg, Json
from holdfast.cli.terminal import columns, say, say_json

WIDTH = 118
Kind = Literal["defenses", "judges", "majorizers", "tasks", "units"]
KINDS: dict[Kind, str] = {
    "defenses": "what `defense` in a run file may name",
    "judges": "what `screening: {judge: ...}` and `certify --judge` may name",
    "majorizers": "what `constraint: {majorizer: ...}` may name",
    "tasks": "what `task: {name: ...}` may name",
    "units": "what `constraint: {unit: ...}` and `--unit` may name",
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
        return
    if kind == "defenses":
        say("\n".join(_defense_lines(rows)))
    else:
        say("\n".join(columns([(row["name"], row["summary"]) for row in rows])))
    if kind is None:
        say("holdfast ls NAME lists one of them. The report of a finished run: holdfast report RUN")


def _defense_lines(rows: list[dict[str, Any]]) -> list[str]:
    """A name with its summary a defense, and below them its columns, each wrapped in its width."""
    indent = max(len(row["name"]) for row in rows) + 2
    widths = {"stages": 17, "passes": 32, "needs": 11, "reference": WIDTH - indent - 60}

    def line(cells: Iterable[str]) -> str:
        return "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths.values(), strict=True)).rstrip()

    lines = [f"{'name':<{indent}}{line(('stage', 'passes per step', 'side data', 'reference'))}"]
    for row in rows:
        words = {key: row[key] if isinstance(row[key], str) else ", ".join(row[key]) for key in widths}
        cells = [textwrap.wrap(words[key], width - 2, break_on_hyphens=False) for key, width in widths.items()]
        lines += ["", f"{row['name']:<{indent}}{row['summary']}"]
        lines += [" " * indent + line(parts) for parts in zip_longest(*cells, fillvalue="")]
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
    if kind == "units":
        from holdfast.core.units import MEANINGS

        return [{"name": name, "summary": words} for name, words in MEANINGS.items()]
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
