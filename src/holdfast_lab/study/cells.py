"""A study's cells: one model, task, defense, poison ratio and seed each, with an id that is stable and can be read.

Two hashes distinguish cells. The work is everything that can change a number; the cell is the work and the names it has
in tables (label, setting). Cells with equal work are run once. A study's cells are the union of its grids, equal cells
once, in an order that does not depend on chance.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, Literal

from holdfast.core.errors import ConfigError
from holdfast.core.hashing import same_numbers, sha256_json
from holdfast.core.registry import nearest
from holdfast_lab.study.config import Grid, StudyConfig

Kind = Literal["defense", "base", "aligned"]
UNALIGNED = "none"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
HEX = 8


@dataclass(frozen=True)
class Model:
    name: str
    ref: str
    revision: str | None = None


@dataclass(frozen=True)
class Alignment:
    """A model, and the recipe applied to it before fine-tuning: `sft`, or a defense of that stage."""

    model: Model
    name: str

    @cached_property
    def id(self) -> str:
        """`model.recipe-<hash>`; the hash covers every field."""
        return _id([self.model.name, self.name], asdict(self))


@dataclass(frozen=True)
class Defense:
    """A defense with the settings that a study gives it; `label` and `setting` are its names in tables."""

    name: str
    label: str
    setting: str = ""
    preset: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    constraint: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    kind: Kind  # `defense` for a fine-tuned model; `base` and `aligned` for the models before fine-tuning
    model: Model  # the model that everything starts from
    task: str  # a name in `TASKS`
    defense: Defense  # for base and aligned a placeholder of that name
    align: str  # the recipe whose result is fine-tuned or measured; `none` for base
    poison_ratio: float | None = None  # share of harmful pairs in the task data; None unless `kind` is defense
    seed: int | None = None  # the run's seed; None unless `kind` is defense

    @property
    def alignment(self) -> Alignment | None:
        """What must be aligned first; None for the base model."""
        return None if self.align == UNALIGNED else Alignment(self.model, self.align)

    @cached_property
    def work_id(self) -> str:
        """`model.task.defense[.recipe][.pRATIO.sSEED]-<hash>`: what is computed, whatever it is called."""
        stem, work = self._named()
        del work["defense"]["label"], work["defense"]["setting"]
        return _id(stem, work)

    @cached_property
    def id(self) -> str:
        """The work with its label and setting; the name of the result file."""
        stem, work = self._named()
        label = self.defense.label if self.defense.label != self.defense.name else ""
        return _id([*stem, *filter(None, (label, self.defense.setting))], work)

    def _named(self) -> tuple[list[str], dict[str, Any]]:
        """The readable parts of an id, and what is hashed."""
        parts = [self.model.name, self.task, self.defense.name]
        parts += [self.align] if self.align not in (UNALIGNED, "sft", self.defense.name) else []
        parts += [f"p{self.poison_ratio:g}.s{self.seed}"] if self.kind == "defense" else []
        values = asdict(self)
        values["defense"]["filter"] = {}  # a block of its own once: cells without one keep their ids
        return parts, values

    def names(self) -> dict[str, object]:
        """The fields of a result that tell cells of equal work apart."""
        return {"cell": self.id, "label": self.defense.label, "setting": self.defense.setting}


def reference_cell(model: Model, task: str, align: str) -> Cell:
    """The base model (`none`) or an aligned model, measured on a task."""
    kind: Kind = "base" if align == UNALIGNED else "aligned"
    return Cell(kind, model, task, Defense(kind, kind), align)


def _id(names: list[str], hashed: Mapping[str, object]) -> str:
    slugs = (re.sub(r"[^a-z0-9._]+", "-", name.lower()).strip("-.")[:48] or "x" for name in names)
    return f"{'.'.join(slugs)}-{sha256_json(same_numbers(hashed))[:HEX]}"


@dataclass(frozen=True)
class Node:
    """One piece of work for one process."""

    id: str  # of the alignment, or of the cells' common work
    alignment: Alignment | None  # what is aligned, or what the cells start from; None for the base model
    cells: tuple[Cell, ...] = ()  # the cells that this work answers; none for an alignment
    needs: str | None = None  # the node that must have succeeded before
    after: str | None = None  # a node that must have ended before, well or not: both fill one store of replies

    @property
    def is_alignment(self) -> bool:
        return not self.cells


def build_graph(cells: list[Cell]) -> list[Node]:
    """Nodes such that each comes after those it depends on; every alignment and every piece of work once.

    An alignment stands right before the first cell that needs it, so that work on one model stays together.
    """
    work: dict[str, list[Cell]] = {}
    for cell in cells:
        work.setdefault(cell.work_id, []).append(cell)
    nodes: dict[str, Node] = {}
    last_of_group: dict[object, str] = {}
    for id_, same in work.items():
        alignment = same[0].alignment
        if alignment is not None and alignment.id not in nodes:
            nodes[alignment.id] = Node(alignment.id, alignment)
        after = None
        if same[0].kind != "defense":  # its harm replies serve all tasks: whoever comes second finds them
            group = (same[0].model, same[0].align)
            after = last_of_group.get(group)
            last_of_group[group] = id_
        nodes[id_] = Node(id_, alignment, tuple(same), needs=alignment.id if alignment else None, after=after)
    return list(nodes.values())


def expand(study: StudyConfig) -> list[Cell]:
    """All cells of a study.

    A grid gives models x seeds x tasks x poison ratios x defenses in this order, so that the first seed's comparison is
    complete before the second begins; the rows of a model before fine-tuning come before those it is compared with.
    """
    found = (cell for grid in (Grid(), *study.grids) for cell in _grid_cells(study, grid))
    cells = list({cell.id: cell for cell in found}.values())
    models: dict[str, Model] = {}
    rows: dict[object, Cell] = {}
    for cell in cells:  # tables distinguish cells by names alone, so names must do it
        names = (cell.model.name, cell.task, cell.kind, cell.defense.label, cell.defense.setting, cell.align)
        if models.setdefault(cell.model.name, cell.model) != cell.model:
            what = f"models: two models are called {cell.model.name!r}"
            raise ConfigError(what, remedy="give one of them another name: {ref: ..., name: ...}")
        if (other := rows.setdefault((*names, cell.poison_ratio, cell.seed), cell)) is not cell:
            raise ConfigError(
                f"defenses: {other.id} and {cell.id} differ, but not in label ({cell.defense.label!r})"
                f" or setting ({cell.defense.setting!r})",
                remedy="give one of the two entries its own `label` or `setting`",
            )
    return cells


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


@dataclass(frozen=True)
class LeftOut:
    """A cell that cannot be run here, and the unknown names in it."""

    cell: Cell
    unknown: tuple[str, ...]


def split_known(
    cells: list[Cell], *, defenses: Collection[str], tasks: Collection[str], skip_unknown: bool = False
) -> tuple[list[Cell], list[LeftOut]]:
    """The cells whose defense, alignment and task this version has, and the others."""
    advice: dict[str, str] = {}
    found, left = [], []
    for cell in cells:
        named = [("task", cell.task, tasks)]
        named += [("defense", cell.defense.name, defenses)] if cell.kind == "defense" else []
        named += [("defense", cell.align, defenses)] if cell.align != UNALIGNED else []
        hints = {f"{kind} {name!r}": nearest(name, list(known)) for kind, name, known in named if name not in known}
        advice |= hints
        if hints:
            left.append(LeftOut(cell, tuple(hints)))
        else:
            found.append(cell)
    if left and not skip_unknown:
        lines = "".join(f"\n  - {name}: {hint}" for name, hint in advice.items())
        what = f"{len(advice)} unknown name{'s' if len(advice) > 1 else ''} in {len(left)} of {len(cells)} cells{lines}"
        raise ConfigError(what, remedy="correct the names, or leave these cells out with --skip-unknown")
    if not found:
        what = f"none of the {len(cells)} cells can be run"
        raise ConfigError(what, remedy="name a defense and a task of this version")
    return found, left


def known_names() -> tuple[Collection[str], Collection[str]]:
    from holdfast.data.tasks import TASKS
    from holdfast.training.hooks import DEFENSES

    return list(DEFENSES), list(TASKS)
