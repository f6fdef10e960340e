"""The main table: models x defenses x tasks at one poison ratio; HS, HS_qK and FA."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.tables.choosing import at_ratio, attack_ratio, measured, without_elsewhere
from holdfast.tables.grid import Block, Plan, fill
from holdfast.tables.lines import lines_of, plain
from holdfast.tables.results import Result
from holdfast.tables.table import Column, Table
from holdfast.tables.wording import ordered_models, ordered_tasks, quantile, task_title

METRICS = ("HS", "HS_qK", "FA")


def main(results: Sequence[Result]) -> list[Table]:
    """One table; every model has a section with the rows of all, so that what was not run is seen."""
    found, notes = without_elsewhere(plain(measured(results)))
    ratio = attack_ratio(found)
    found = at_ratio(found, ratio)
    if not found:
        return []
    tasks = ordered_tasks(result.task for result in found)
    lines = lines_of(found)
    plan = Plan(
        "main",
        "main",
        "Harm and utility" + (f" at poison ratio p = {ratio:g}" if ratio is not None else ""),
        [Column(task_title(task), name, task, ratio) for task in tasks for name in METRICS],
        [
            Block(f"{model} (K = {quantile(model)})", model, lines, poison_ratio=ratio)
            for model in ordered_models(result.model for result in found)
        ],
        found,
        notes=notes,
    )
    return [fill(plan)]
