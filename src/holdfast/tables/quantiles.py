"""The quantiles: per model and task, HS and the K-th percentiles of the per-prompt harm, at one poison ratio."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.tables.choosing import at_ratio, attack_ratio, by_model_and_task, measured, place_title, without_elsewhere
from holdfast.tables.grid import Block, Plan, fill
from holdfast.tables.lines import lines_of, plain
from holdfast.tables.results import Result
from holdfast.tables.table import Column, Table
from holdfast.tables.wording import QUANTILES, slug


def quantiles(results: Sequence[Result]) -> list[Table]:
    """A table per model and task whose judge gave probabilities."""
    found, notes = without_elsewhere(plain(measured(results)))
    ratio = attack_ratio(found)
    names = ["HS", *(f"HS_q{k}" for k in QUANTILES), "FA"]
    tables = []
    for model, task, group in by_model_and_task(at_ratio(found, ratio)):
        if not any(name.startswith("HS_q") for result in group for name in result.metrics):
            continue
        plan = Plan(
            "quantiles",
            slug("quantiles", model, task),
            f"Quantiles of harm, {place_title(model, task, ratio)}",
            [Column("", name, task) for name in names],
            [Block("", model, lines_of(group), task, ratio)],
            group,
            notes=notes,
        )
        tables.append(fill(plan))
    return tables
