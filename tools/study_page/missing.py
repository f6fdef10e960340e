"""Which cells of a study are not there yet, in one line a reader can act on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from holdfast_lab.tables.lines import ordered_tasks, task_title

Place = tuple[float, int]  # poison ratio and seed


@dataclass(frozen=True)
class Wanted:
    """A cell that a study asks for; a model before fine-tuning has neither poison ratio nor seed."""

    cell: str
    task: str
    row: str
    defense: str
    poison_ratio: float | None = None
    seed: int | None = None


def missing_line(wanted: Sequence[Wanted], there: Collection[str], study: str, *, again: bool = False) -> str:
    """How many cells of the study are there, and the others by task, ratio and seed; `again`: they stand above."""
    open_ = [one for one in wanted if one.cell not in there]
    count = f"{len(wanted) - len(open_)} of the {len(wanted)} cells of {study} are there"
    if not open_:
        return f"{count}: none is missing."
    if again:
        return f"{count}; the missing ones are listed above."
    parts = [_of_task(task, wanted, open_) for task in ordered_tasks(one.task for one in open_)]
    return f"{count}. Missing: {'; '.join(parts)}."


def _of_task(task: str, wanted: Sequence[Wanted], open_: Sequence[Wanted]) -> str:
    every, left = ([one for one in cells if one.task == task] for cells in (wanted, open_))
    name = task_title(task)
    if len(left) == len(every):
        return f"{name}, all {len(every)}"
    parts = []
    if references := [one.row for one in left if one.seed is None]:
        parts.append(_rows(references))
    groups: dict[str, list[Place]] = {}
    for place in dict.fromkeys(_place(one) for one in left if one.seed is not None):
        rows = [one.row for one in left if _place(one) == place]
        whole = len(rows) == sum(_place(one) == place for one in every)
        groups.setdefault("every row" if whole else _rows(rows), []).append(place)
    sweeps = len({one.poison_ratio for one in every if one.seed is not None}) > 1
    parts += [f"{where} {rows}" for rows, places in groups.items() for where in _where(places, sweeps)]
    return f"{name} ({len(left)}): " + "; ".join(parts)


def _place(one: Wanted) -> Place:
    return (one.poison_ratio or 0.0, -1 if one.seed is None else one.seed)


def _where(places: Sequence[Place], sweeps: bool) -> list[str]:
    """Ratios with the same seeds stand together."""
    seeds: dict[float, list[int]] = {}
    for ratio, seed in places:
        seeds.setdefault(ratio, []).append(seed)
    groups: dict[tuple[int, ...], list[float]] = {}
    for ratio, found in seeds.items():
        groups.setdefault(tuple(sorted(found)), []).append(ratio)
    return [
        (f"p = {_listed([f'{ratio:g}' for ratio in sorted(ratios)])}, " if sweeps else "")
        + f"seed{'s' if len(found) > 1 else ''} {_listed(list(map(str, found)))}:"
        for found, ratios in groups.items()
    ]


def _rows(rows: Sequence[str]) -> str:
    return " / ".join(rows)  # some have a comma of their own


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words)
