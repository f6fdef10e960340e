"""The poison sweep: per model and task, HS, HS_qK and FA at every poison ratio."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.tables.choosing import attack_ratio, by_model_and_task, measured, place_title, without_elsewhere
from holdfast.tables.grid import Block, Plan, fill
from holdfast.tables.lines import lines_of, plain
from holdfast.tables.results import Result
from holdfast.tables.table import Column, Table
from holdfast.tables.wording import quantile, slug


def poison_sweep(results: Sequence[Result]) -> list[Table]:
    """A table per model and task that was run at another ratio than the main table's."""
    found, notes = without_elsewhere(plain(measured(results)))
    shown_in_main = {attack_ratio(found)}
    tables = []
    for model, task, group in by_model_and_task(found):
        ratios = sorted({result.poison_ratio for result in group if result.poison_ratio is not None})
        if not ratios or set(ratios) == shown_in_main:
            continue
        names = ("HS", f"HS_q{quantile(model)}", "FA")
        columns = [Column(f"p = {ratio:g}", name, task, ratio) for ratio in ratios for name in names]
        constant = ("Base and Aligned do not depend on p",) if any(r.is_reference for r in group) else ()
        plan = Plan(
            "poison_sweep",
            slug("poison_sweep", model, task),
            f"Poison sweep, {place_title(model, task)}",
            columns,
            [Block("", model, lines_of(group), task)],
            group,
            notes=notes + constant,
        )
        tables.append(fill(plan))
    return tables
