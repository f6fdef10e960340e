"""What a study will do: its cells, those that cannot be run here, its protocol and its graph."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from holdfast_lab.study.cells import Cell, LeftOut, Node, build_graph, expand, known_names, split_known
from holdfast_lab.study.config import StudyConfig
from holdfast_lab.study.folder import StudyFolder


@dataclass(frozen=True)
class Calls:
    """The functions that do the work, as `module:function`; workers import them by name."""

    protocol: str = "holdfast_lab.study.protocol:load_protocol"  # `(preset, overrides)` to a block with `model_dump`
    # align, cell: `(node, folder)` to a mapping, see `holdfast_lab.study.cell`
    align: str = "holdfast_lab.study.cell:run_alignment"
    cell: str = "holdfast_lab.study.cell:run_cell"
    # `(protocol, cells, data=...)`; raises for cells that could not be finished
    check: str = "holdfast_lab.study.preflight:require_ready"


@dataclass(frozen=True)
class Plan:
    study: StudyConfig
    protocol: dict[str, Any]
    cells: list[Cell]
    left_out: list[LeftOut]
    nodes: list[Node]
    folder: StudyFolder
    calls: Calls = field(default_factory=Calls)

    @property
    def alignments(self) -> int:
        return sum(node.is_alignment for node in self.nodes)

    def states(self) -> dict[str, str]:
        """Node id to `done`, `failed` or `to do`, from the files in the folder."""
        states = {}
        for node in self.nodes:
            failed = "failed" if self.folder.failure(node) is not None else "to do"
            states[node.id] = "done" if self.folder.finished(node) else failed
        return states

    def check(self, *, data: bool = True) -> None:
        """Refuse what is still to be run where it could not be finished: see `holdfast_lab.study.preflight`."""
        states = self.states()
        if open_ := [cell for node in self.nodes if states[node.id] != "done" for cell in node.cells]:
            resolve_name(self.calls.check)(self.protocol, open_, data=data)


def make_plan(
    study: StudyConfig,
    *,
    skip_unknown: bool = False,
    calls: Calls | None = None,
    names: Callable[[], tuple[Collection[str], Collection[str]]] = known_names,
) -> Plan:
    calls = calls or Calls()
    defenses, tasks = names()
    cells, left_out = split_known(expand(study), defenses=defenses, tasks=tasks, skip_unknown=skip_unknown)
    protocol = resolve_name(calls.protocol)(study.preset, study.protocol).model_dump()
    folder = StudyFolder(Path(study.output_dir))
    protocol = folder.require_protocol(protocol)
    return Plan(study, protocol, cells, left_out, build_graph(cells), folder, calls)
