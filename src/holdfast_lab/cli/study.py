"""`holdfast study`: run a study file, all its cells, and go on where an earlier call stopped."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.options import Json, Opt, Overrides
from holdfast.cli.terminal import clean, columns, counted, duration, interruptible, note, say, say_json
from holdfast.core.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast_lab.study.schedule import Listener, Outcome, Plan, Progress

EVERY = 60.0  # seconds between plain lines while nothing changes


def study(
    file: Annotated[Path, typer.Argument(help="The study file (YAML).", metavar="STUDY.yaml")],
    overrides: Overrides = None,
    plan: Annotated[bool, Opt("--plan", help="Show what would be run, and stop.")] = False,
    skip_unknown: Annotated[
        bool, Opt("--skip-unknown", help="Leave out cells whose defense or task this version lacks.")
    ] = False,
    retry_failed: Annotated[bool, Opt("--retry-failed", help="Run again what failed earlier.")] = False,
    resume: Annotated[bool, Opt("--resume", help="What happens anyway: finished cells are kept.")] = False,
    json: Json = False,
) -> None:
    """Run a study of defenses over tasks and seeds.

    Models x tasks x defenses x poison ratios x seeds; the same command again goes on where it stopped.

    \b
    Example:
      holdfast study studies/small.yaml --plan
      holdfast study studies/small.yaml seeds=[42,1337] workers=4
    """
    from holdfast_lab.study.config import load_study
    from holdfast_lab.study.schedule import make_plan

    made = make_plan(load_study(file, overrides or ()), skip_unknown=skip_unknown)
    if plan:
        _show_plan(made, json)
        return
    from holdfast_lab.study.schedule import run_study

    note(f"{_counts(made)}; results in {made.folder.results}")
    if made.study.engine == "ray":
        note("engine ray: every machine of the cluster must see that folder under the same path")
    with interruptible("the same command goes on where the study stood"), _listener() as listener:
        outcome = run_study(made, retry_failed=retry_failed, listener=listener)
    if json:
        places = {"output_dir": str(made.folder.root), "results": str(made.folder.results)}
        say_json({**places, **vars(outcome), "left_out": [entry.cell.id for entry in made.left_out]})
    else:
        _show_outcome(made, outcome)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


def _counts(plan: Plan) -> str:
    unknown = dict.fromkeys(f"no {name}" for left in plan.left_out for name in left.unknown)
    left = f"; {counted(len(plan.left_out), 'cell')} left out: {', '.join(unknown)}" if plan.left_out else ""
    return f"{counted(plan.alignments, 'alignment')}, {counted(len(plan.cells), 'cell')}{left}"


def _show_plan(plan: Plan, json: bool) -> None:
    states, refused = plan.states(), None
    try:
        plan.check(data=False)
    except HoldfastError as error:  # a plan is shown all the same
        refused = error
    rows = [
        {
            "cell": cell.id, "model": cell.model.name, "task": cell.task, "defense": cell.defense.name,
            "label": cell.defense.label, "setting": cell.defense.setting, "align": cell.align,
            "poison_ratio": cell.poison_ratio, "seed": cell.seed, "state": states[node.id],
        }
        for node in plan.nodes
        for cell in node.cells
    ]  # fmt: skip
    if json:
        left = [{"cell": entry.cell.id, "unknown": list(entry.unknown)} for entry in plan.left_out]
        why = None if refused is None else {"what": refused.what, "remedy": refused.remedy}
        say_json({"alignments": plan.alignments, "cells": rows, "left_out": left, "refused": why})
        return
    say(_counts(plan))
    if refused is not None:
        note(f"as it stands this study would be refused: {refused.what}\n  What to do: {refused.remedy}")
    shown = ("model", "task", "label", "setting", "align", "poison_ratio", "seed", "state")
    say("\n".join(columns([shown, *([_shown(row[name]) for name in shown] for row in rows)])))


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:g}" if isinstance(value, float) else clean(str(value)).replace("\n", " ")


def _show_outcome(plan: Plan, outcome: Outcome) -> None:
    for id_, record in outcome.failures.items():
        note(f"failed: {id_}: {record['what']}\n  What to do: {record['remedy']}")
    if outcome.failures:
        blocked = f", {len(outcome.blocked)} wait for an alignment that failed" if outcome.blocked else ""
        note(f"{counted(len(outcome.failed), 'cell')} failed{blocked}; --retry-failed runs again what failed")
    done = f"{len(outcome.done)} of {len(plan.cells)} cells done; {plan.folder.results}"
    say(f"{done}; tables: holdfast tables {plan.folder.root}" if outcome.done else done)


def describe(progress: Progress) -> str:
    parts = [f"{progress.done}/{progress.total} done", f"{len(progress.running)} running"]
    parts += [f"{progress.failed} failed"] if progress.failed else []
    parts += [] if progress.eta is None else [f"eta {duration(progress.eta)}"]
    return ", ".join(parts)


@contextmanager
def _listener() -> Iterator[Listener]:
    last, when = tuple[Any, ...](), 0.0

    def plain(progress: Progress) -> None:
        nonlocal last, when
        now = (progress.done, progress.failed, progress.running)
        if now != last or time.monotonic() - when >= EVERY:
            last, when = now, time.monotonic()
            note(f"{describe(progress)}: {', '.join(progress.running)}")

    if not sys.stderr.isatty():
        yield plain
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    with Live(console=Console(stderr=True), transient=True, refresh_per_second=4) as live:

        def show(progress: Progress) -> None:
            bar = ProgressBar(total=progress.total, completed=progress.done + progress.failed, width=48)
            running = (Text(f"  {clean(id_)}", no_wrap=True) for id_ in progress.running)
            live.update(Group(bar, Text(describe(progress)), *running))

        yield show
