"""A cell: one model, task, defense, poison ratio and seed, with an id that is stable and can be read; and the order in
which alignments and cells depend on each other.

Two hashes tell cells apart. The work is everything that can change a number; the cell is the work and the names it has
in tables (label, setting). Cells with equal work are run once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from holdfast.core.hashing import same_numbers, sha256_json

Kind = Literal["defense", "base", "aligned"]
UNALIGNED = "none"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
HEX = 8


@dataclass(frozen=True)
class Model:
    """A model by its name in tables and its place."""

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
        return f"{_slug(self.model.name)}.{_slug(self.name)}-{_short(asdict(self))}"


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
    """One measurement of a study."""

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
        work = self._hashed()
        del work["defense"]["label"], work["defense"]["setting"]
        return f"{self._stem}-{_short(work)}"

    @cached_property
    def id(self) -> str:
        """The work with its label and setting; the name of the result file."""
        names = (self.defense.label if self.defense.label != self.defense.name else "", self.defense.setting)
        return f"{'.'.join([self._stem, *(_slug(name) for name in names if name)])}-{_short(self._hashed())}"

    def _hashed(self) -> dict[str, Any]:
        values = asdict(self)
        values["defense"]["filter"] = {}  # a block of its own once: cells without one keep their ids
        return values

    @property
    def _stem(self) -> str:
        parts = [_slug(self.model.name), _slug(self.task), _slug(self.defense.name)]
        if self.align not in (UNALIGNED, "sft", self.defense.name):
            parts.append(_slug(self.align))
        if self.kind == "defense":
            parts.append(f"p{self.poison_ratio:g}.s{self.seed}")
        return ".".join(parts)

    def row(self) -> tuple[Any, ...]:
        """What tells this cell apart in a table; two cells of one study cannot share it."""
        names = (self.model.name, self.task, self.kind, self.defense.label, self.defense.setting, self.align)
        return (*names, self.poison_ratio, self.seed)

    def names(self) -> dict[str, Any]:
        """The fields of a result that tell cells of equal work apart."""
        return {"cell": self.id, "label": self.defense.label, "setting": self.defense.setting}


def reference_cell(model: Model, task: str, align: str) -> Cell:
    """The base model (`none`) or an aligned model, measured on a task."""
    kind: Kind = "base" if align == UNALIGNED else "aligned"
    return Cell(kind, model, task, Defense(kind, kind), align)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-.")[:48] or "x"


def _short(value: Mapping[str, Any]) -> str:
    return sha256_json(same_numbers(value))[:HEX]


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
        """Whether this aligns a model rather than answering cells."""
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
