"""Which results a table looks at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.tables.results import Result
from holdfast.tables.wording import ELSEWHERE, defense_title, ordered_models, ordered_tasks, task_title

PAPER_RATIO = 0.5


def measured(results: Iterable[Result]) -> list[Result]:
    """Results that hold harm or utility, as opposed to a profile of the training step."""
    return [result for result in results if "HS" in result.metrics or "FA" in result.metrics]


def attack_ratio(results: Iterable[Result]) -> float | None:
    """The poison ratio of tables that have one: the paper's 0.5 where it was run, otherwise the highest."""
    ratios = {result.poison_ratio for result in results if result.poison_ratio is not None}
    return PAPER_RATIO if PAPER_RATIO in ratios else max(ratios, default=None)


def at_ratio(results: Iterable[Result], ratio: float | None) -> list[Result]:
    """The references, and the cells of one poison ratio."""
    return [result for result in results if result.is_reference or result.poison_ratio == ratio]


def by_model_and_task(results: Sequence[Result]) -> list[tuple[str, str, list[Result]]]:
    """Groups (model, task, results) in the order of the tables; empty ones are left out."""
    models = ordered_models(result.model for result in results)
    tasks = ordered_tasks(result.task for result in results)
    groups = [
        (model, task, [result for result in results if (result.model, result.task) == (model, task)])
        for model in models
        for task in tasks
    ]
    return [group for group in groups if group[2]]


def without_elsewhere(results: Iterable[Result]) -> tuple[list[Result], tuple[str, ...]]:
    """The results less those compared in tables of their own, and the note that says so."""
    found = list(results)
    kept = [result for result in found if result.defense not in ELSEWHERE]
    left = sorted({defense_title(result.defense) for result in found if result.defense in ELSEWHERE})
    return kept, ((f"in tables of their own: {', '.join(left)}",) if left else ())


def place_title(model: str, task: str, ratio: float | None = None) -> str:
    """`model / task at p = 0.5`."""
    return f"{model} / {task_title(task)}" + (f" at p = {ratio:g}" if ratio is not None else "")
