"""What a study will do: its cells, those that cannot be run here, its protocol and its graph."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.study.cells import Cell
from holdfast.study.expand import LeftOut, expand, known_names, split_known
from holdfast.study.folder import StudyFolder
from holdfast.study.graph import Node, build_graph
from holdfast.study.schema import StudyConfig


@dataclass(frozen=True)
class Calls:
    """The functions that do the work, as `module:function`; workers import them by name.

    Attributes:
        protocol: `(preset, overrides)` to a block with `model_dump`.
        align, cell: `(node, folder)` to a mapping, see `holdfast.study.cell`.
        check: `(protocol, cells, data=...)`; raises for cells that could not be finished.
    """

    protocol: str = "holdfast.study.protocol:load_protocol"
    align: str = "holdfast.study.cell:run_alignment"
    cell: str = "holdfast.study.cell:run_cell"
    check: str = "holdfast.study.ready:require_ready"


@dataclass(frozen=True)
class Plan:
    """A study, ready to run."""

    study: StudyConfig
    protocol: dict[str, Any]
    cells: list[Cell]
    left_out: list[LeftOut]
    nodes: list[Node]
    folder: StudyFolder
    calls: Calls = field(default_factory=Calls)

    @property
    def alignments(self) -> int:
        """How many models are aligned."""
        return sum(node.is_alignment for node in self.nodes)

    def states(self) -> dict[str, str]:
        """Node id to `done`, `failed` or `to do`, from the files in the folder."""
        return {node.id: self._state(node) for node in self.nodes}

    def check(self, *, data: bool = True) -> None:
        """Refuse what is still to be run where it could not be finished: see `holdfast.study.ready`."""
        states = self.states()
        if open_ := [cell for node in self.nodes if states[node.id] != "done" for cell in node.cells]:
            _function(self.calls.check)(self.protocol, open_, data=data)

    def _state(self, node: Node) -> str:
        if self.folder.finished(node):
            return "done"
        return "failed" if self.folder.failure(node) is not None else "to do"


def make_plan(
    study: StudyConfig,
    *,
    skip_unknown: bool = False,
    calls: Calls | None = None,
    names: Callable[[], tuple[Collection[str], Collection[str]]] = known_names,
) -> Plan:
    """Expand a study and check that it can run.

    Raises:
        ConfigError: unknown names without `skip_unknown`, ambiguous rows, or a wrong protocol.
        CheckpointError: output_dir holds a study with another protocol.
    """
    calls = calls or Calls()
    defenses, tasks = names()
    cells, left_out = split_known(expand(study), defenses=defenses, tasks=tasks, skip_unknown=skip_unknown)
    protocol = _function(calls.protocol)(study.preset, study.protocol).model_dump()
    folder = StudyFolder(Path(study.output_dir))
    protocol = folder.require_protocol(protocol)
    return Plan(study, protocol, cells, left_out, build_graph(cells), folder, calls)


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)
