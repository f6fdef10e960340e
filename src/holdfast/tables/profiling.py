"""The profile: what a training step costs under each defense."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.tables.choosing import by_model_and_task, place_title
from holdfast.tables.grid import Block, Plan, fill
from holdfast.tables.lines import lines_of
from holdfast.tables.results import Result
from holdfast.tables.table import Column, Table

METRICS = ("step_ms", "p90_ms", "gpu_mb", "samples_per_s", "x_sft")


def profiling(results: Sequence[Result]) -> list[Table]:
    """One table, a section per model and task; nothing is marked, since cost is not what is compared."""
    found = [result for result in results if "step_ms" in result.metrics]
    if not found:
        return []
    groups = by_model_and_task(found)
    plan = Plan(
        "profiling",
        "profiling",
        "Cost of a training step",
        [Column("", name) for name in METRICS],
        [Block(place_title(model, task), model, lines_of(group), task) for model, task, group in groups],
        found,
        marks=False,
    )
    return [fill(plan)]
