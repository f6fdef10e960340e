"""The primal-dual ablation: holdfast against the primal-dual method, per model; the sections are tasks."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.tables.choosing import at_ratio, attack_ratio, measured
from holdfast.tables.grid import Block, Plan, fill
from holdfast.tables.lines import lines_of, plain
from holdfast.tables.results import Result
from holdfast.tables.table import Column, Table
from holdfast.tables.wording import ordered_models, ordered_tasks, quantile, slug, task_title


def primal_dual(results: Sequence[Result]) -> list[Table]:
    """A table per model that was trained with `primal_dual`; only the best is marked, as there are two rows."""
    found = [result for result in plain(measured(results)) if result.defense in ("holdfast", "primal_dual")]
    ratio = attack_ratio([result for result in found if result.defense == "primal_dual"])
    found = at_ratio(found, ratio)
    tables = []
    for model in ordered_models(result.model for result in found if result.defense == "primal_dual"):
        group = [result for result in found if result.model == model]
        tasks = ordered_tasks(result.task for result in group if result.defense == "primal_dual")
        names = ("HS", f"HS_q{quantile(model)}", "FA")
        lines = lines_of(group)
        plan = Plan(
            "primal_dual",
            slug("primal_dual", model),
            f"Barrier filter and primal-dual method, {model} at p = {ratio:g}",
            [Column("", name) for name in names],
            [Block(task_title(task), model, lines, task, ratio, same_seeds=True) for task in tasks],
            group,
            head="Method",
            second=False,
        )
        tables.append(fill(plan))
    return tables
