"""From a study to its cells: the union of its grids, equal cells once, in an order that does not depend on chance."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product

from holdfast.core.errors import ConfigError
from holdfast.core.registry import nearest
from holdfast_lab.study.cells import EMBEDDED_NAME, UNALIGNED, Cell, Defense, Model, reference_cell
from holdfast_lab.study.schema import Grid, StudyConfig


def expand(study: StudyConfig) -> list[Cell]:
    """All cells of a study.

    A grid gives models x seeds x tasks x poison ratios x defenses in this order, so that the first seed's comparison is
    complete before the second begins; the rows of a model before fine-tuning come before those it is compared with.
    """
    cells: dict[str, Cell] = {}
    for grid in (Grid(), *study.grids):
        for cell in _grid_cells(study, grid):
            cells.setdefault(cell.id, cell)
    _refuse_shared_names(list(cells.values()))
    return list(cells.values())


def _grid_cells(study: StudyConfig, grid: Grid) -> Iterator[Cell]:
    tasks = grid.tasks or study.tasks
    entries = grid.defenses or study.defenses
    for block in grid.models or study.models:
        plain = EMBEDDED_NAME if block.ref == "embedded" else block.ref.rstrip("/").rpartition("/")[2]
        model = Model(block.name or plain, block.ref, block.revision)
        if study.references:
            recipes = dict.fromkeys(entry.align for entry in entries)
            for align, task in product((UNALIGNED, *recipes), tasks):
                yield reference_cell(model, task, align)
        ratios, seeds = grid.poison_ratios or study.poison_ratios, grid.seeds or study.seeds
        for seed, task, ratio, entry in product(seeds, tasks, ratios, entries):
            defense = Defense(**{**entry.model_dump(exclude={"align"}), "label": entry.label or entry.name})
            yield Cell("defense", model, task, defense, entry.align, float(ratio), seed)


def _refuse_shared_names(cells: list[Cell]) -> None:
    """Tables tell cells apart by names alone, so names must do it."""
    models: dict[str, Model] = {}
    rows: dict[object, Cell] = {}
    for cell in cells:
        if models.setdefault(cell.model.name, cell.model) != cell.model:
            raise ConfigError(
                f"models: two models are called {cell.model.name!r}",
                remedy="give one of them another name: {ref: ..., name: ...}",
            )
        if (other := rows.setdefault(cell.row(), cell)) is not cell:
            raise ConfigError(
                f"defenses: {other.id} and {cell.id} differ, but not in label ({cell.defense.label!r})"
                f" or setting ({cell.defense.setting!r})",
                remedy="give one of the two entries its own `label` or `setting`",
            )


@dataclass(frozen=True)
class LeftOut:
    """A cell that cannot be run here, and the unknown names in it."""

    cell: Cell
    unknown: tuple[str, ...]


def split_known(
    cells: list[Cell], *, defenses: Collection[str], tasks: Collection[str], skip_unknown: bool = False
) -> tuple[list[Cell], list[LeftOut]]:
    """The cells whose defense, alignment and task this version has, and the others."""
    found: list[Cell] = []
    left: list[LeftOut] = []
    advice: dict[str, str] = {}
    for cell in cells:
        unknown = dict(_unknown(cell, defenses, tasks))
        advice |= unknown
        if unknown:
            left.append(LeftOut(cell, tuple(unknown)))
        else:
            found.append(cell)
    if left and not skip_unknown:
        lines = "".join(f"\n  - {name}: {hint}" for name, hint in advice.items())
        raise ConfigError(
            f"{len(advice)} unknown name{'s' if len(advice) > 1 else ''} in {len(left)} of {len(cells)} cells{lines}",
            remedy="correct the names, or leave these cells out with --skip-unknown",
        )
    if not found:
        raise ConfigError(
            f"none of the {len(cells)} cells can be run", remedy="name a defense and a task of this version"
        )
    return found, left


def _unknown(cell: Cell, defenses: Collection[str], tasks: Collection[str]) -> Iterator[tuple[str, str]]:
    lookup: list[tuple[str, str, Collection[str]]] = [("task", cell.task, tasks)]
    if cell.kind == "defense":
        lookup.append(("defense", cell.defense.name, defenses))
    if cell.align != UNALIGNED:
        lookup.append(("defense", cell.align, defenses))
    for kind, name, known in lookup:
        if name not in known:
            yield f"{kind} {name!r}", nearest(name, list(known))


def known_names() -> tuple[Collection[str], Collection[str]]:
    """The defenses and tasks of this version."""
    from holdfast.data.tasks import TASKS
    from holdfast.training.hooks import DEFENSES

    return list(DEFENSES), list(TASKS)
