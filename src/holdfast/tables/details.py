"""The details: every harm and utility metric of every variant, per model and task; not a table of the paper."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.tables.choosing import at_ratio, attack_ratio, by_model_and_task, measured, place_title
from holdfast.tables.grid import Block, Plan, fill
from holdfast.tables.lines import lines_of
from holdfast.tables.results import Result
from holdfast.tables.table import Column, Table
from holdfast.tables.wording import quantile, slug

METRICS = (
    "HS", "HS_0.5", "HS_plus", "HS_qK", "refusal_rate", "over_refusal", "FA", "FA_strict", "task_loss",
    "violation_rate", "unscored",
)  # fmt: skip


def details(results: Sequence[Result]) -> list[Table]:
    """A table per model and task at the attack's ratio, with the metrics that some row has."""
    found = measured(results)
    ratio = attack_ratio(found)
    tables = []
    for model, task, group in by_model_and_task(at_ratio(found, ratio)):
        names = [name.replace("qK", f"q{quantile(model)}") for name in METRICS]
        there = {name for result in group for name in result.metrics}
        plan = Plan(
            "details",
            slug("details", model, task),
            f"Details, {place_title(model, task, ratio)}",
            [Column("", name) for name in names if name in there],
            [Block("", model, lines_of(group), task, ratio)],
            group,
        )
        tables.append(fill(plan))
    return tables
