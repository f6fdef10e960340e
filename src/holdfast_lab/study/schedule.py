"""What a study will do, and running it: each piece of work once, as soon as what it needs is there, several together.

Whatever is in the study's folder counts, so the same command after a kill goes on where the work stood.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from holdfast.core.event_log import EventLog
from holdfast.core.file_lock import RunLock
from holdfast.core.files import write_json
from holdfast_lab.study.cells import Cell, LeftOut, Node, build_graph, expand, known_names, split_known
from holdfast_lab.study.config import StudyConfig
from holdfast_lab.study.engine import Engine, LocalEngine, RayEngine
from holdfast_lab.study.folder import LOG, StudyFolder
from holdfast_lab.study.worker import INTERRUPTED, of_exit

PAUSE = 0.1  # seconds between two looks at the workers


@dataclass(frozen=True)
class Calls:
    """The functions that do the work, as `module:function`; workers import them by name."""

    protocol: str = "holdfast_lab.study.protocol:load_protocol"  # `(preset, overrides)` to a block with `model_dump`
    # align, cell: `(node, folder)` to a mapping, see `holdfast_lab.study.cell`
    align: str = "holdfast_lab.study.cell:run_alignment"
    cell: str = "holdfast_lab.study.cell:run_cell"
    # `(protocol, cells, data=...)`; raises for cells that could not be finished
    check: str = "holdfast_lab.study.cell:require_ready"


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

        def state(node: Node) -> str:
            failed = "failed" if self.folder.failure(node) is not None else "to do"
            return "done" if self.folder.finished(node) else failed

        return {node.id: state(node) for node in self.nodes}

    def check(self, *, data: bool = True) -> None:
        """Refuse what is still to be run where it could not be finished: see `holdfast_lab.study.cell`."""
        if open_ := [cell for node in self.nodes if not self.folder.finished(node) for cell in node.cells]:
            resolve_name(self.calls.check)(self.protocol, open_, data=data)


def make_plan(
    study: StudyConfig, *, skip_unknown: bool = False, calls: Calls | None = None,
    names: Callable[[], tuple[Collection[str], Collection[str]]] = known_names,
) -> Plan:  # fmt: skip
    calls = calls or Calls()
    defenses, tasks = names()
    cells, left_out = split_known(expand(study), defenses=defenses, tasks=tasks, skip_unknown=skip_unknown)
    folder = StudyFolder(Path(study.output_dir))
    protocol = folder.require_protocol(resolve_name(calls.protocol)(study.preset, study.protocol).model_dump())
    return Plan(study, protocol, cells, left_out, build_graph(cells), folder, calls)


@dataclass(frozen=True)
class Progress:
    """Where a running study stands; counts are cells, `eta` is in seconds where it can be told."""

    total: int
    done: int
    failed: int
    running: tuple[str, ...]
    eta: float | None


@dataclass
class Outcome:
    """How a study ended: cell ids, and by node id why it failed, the first first."""

    done: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)  # these wait for an alignment that failed
    failures: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0, or the exit code of the first failure."""
        return next((int(record["exit_code"]) for record in self.failures.values()), 0)


Listener = Callable[[Progress], None]


def run_study(plan: Plan, *, retry_failed: bool = False, listener: Listener | None = None) -> Outcome:
    """Run what is not done yet, and with `retry_failed` what failed earlier; a failed cell does not stop the others."""
    plan.check()
    with RunLock(plan.folder.root), EventLog(plan.folder.events) as events:
        schedule = _Schedule(plan, events, listener or (lambda progress: None))
        schedule.recall(retry_failed)
        if schedule.pending:
            schedule.run(_engine(plan))
        return schedule.outcome()


def _engine(plan: Plan) -> Engine:
    return (RayEngine if plan.study.engine == "ray" else LocalEngine)(plan.study.workers)


class _Schedule:
    def __init__(self, plan: Plan, events: EventLog, listener: Listener) -> None:
        self._plan, self._events, self._listener = plan, events, listener
        self._nodes = {node.id: node for node in plan.nodes}
        self._state = dict.fromkeys(self._nodes, "pending")
        self._started: dict[str, float] = {}
        self._spent: list[float] = []
        self._failures: dict[str, dict[str, Any]] = {}

    @property
    def pending(self) -> list[Node]:
        return [node for node in self._plan.nodes if self._state[node.id] == "pending"]

    def recall(self, retry_failed: bool) -> None:
        folder = self._plan.folder
        for node in self._plan.nodes:
            record = folder.failure(node)
            if folder.finished(node):
                folder.publish(node)
                self._state[node.id] = "done"
            elif record is not None and retry_failed:
                folder.forget_failure(node)
            elif record is not None:
                self._state[node.id], self._failures[node.id] = "failed", record
        wanted = {node.needs for node in self.pending}
        spared = (node.id for node in self.pending if node.is_alignment and node.id not in wanted)
        self._state |= dict.fromkeys(spared, "not needed")
        self._block()
        self._record()

    def run(self, engine: Engine) -> None:
        try:
            while True:
                for node in self._ready()[: engine.capacity - len(self._started)]:
                    self._start(node, engine)
                if not self._started:
                    return
                self._listener(self._progress(engine.capacity))
                for id_, code in engine.ended():
                    self._end(self._nodes[id_], code)
                time.sleep(PAUSE)
        finally:
            engine.stop()
            self._state |= dict.fromkeys(self._started, "pending")
            self._record()

    def _ready(self) -> list[Node]:
        def ended(id_: str | None) -> bool:
            return id_ is None or self._state[id_] not in ("pending", "running")

        return [n for n in self.pending if ended(n.after) and (n.needs is None or self._state[n.needs] == "done")]

    def _start(self, node: Node, engine: Engine) -> None:
        calls = self._plan.calls
        call = calls.align if node.is_alignment else calls.cell
        file = self._plan.folder.write_node(node, call=call, protocol=self._plan.protocol)
        self._move(node, "running", "start")
        self._started[node.id] = time.monotonic()
        engine.start(node.id, file)

    def _end(self, node: Node, code: int) -> None:
        seconds = time.monotonic() - self._started.pop(node.id)
        folder = self._plan.folder
        if code == 0 and folder.finished(node):
            folder.forget_failure(node)
            if not node.is_alignment:
                self._spent.append(seconds)
            self._move(node, "done", "finish", seconds=round(seconds, 3))
            return
        if (record := folder.failure(node)) is None:
            record = {"node": node.id, **of_exit(code, folder.place(node) / LOG)}
            # Where somebody stopped the worker it is not a fault of the cell, and nothing is kept.
            for path in folder.error_files(node) if code != INTERRUPTED else ():
                write_json(path, record)
        self._failures[node.id] = record
        self._move(node, "failed", "fail", seconds=round(seconds, 3), exit_code=record["exit_code"])
        self._block()

    def _block(self) -> None:
        for node in self.pending:
            if node.needs is not None and self._state[node.needs] == "failed":
                self._state[node.id] = "blocked"

    def _move(self, node: Node, state: str, event: str, **more: object) -> None:
        self._state[node.id] = state
        kind = "align" if node.is_alignment else "cell"
        self._events.append({"time": round(time.time(), 3), "event": event, "kind": kind, "node": node.id, **more})

    def _record(self) -> None:
        """Write study.json: once at the start and once at the end, since its size grows with the number of cells."""
        plan = self._plan
        states = {
            "cells": {cell.id: self._state[node.id] for node in plan.nodes for cell in node.cells},
            "alignments": {node.id: self._state[node.id] for node in plan.nodes if node.is_alignment},
            "left_out": {left.cell.id: list(left.unknown) for left in plan.left_out},
        }
        plan.folder.write_record(plan.study.model_dump(), plan.protocol, states)

    def _progress(self, capacity: int) -> Progress:
        counts = Counter(self._state[node.id] for node in self._plan.nodes for _ in node.cells)
        left = sum(not node.is_alignment for node in self.pending) + len(self._started) / 2
        eta = left * sum(self._spent) / len(self._spent) / capacity if self._spent else None
        failed = counts["failed"] + counts["blocked"]
        return Progress(len(self._plan.cells), counts["done"], failed, tuple(self._started), eta)

    def outcome(self) -> Outcome:
        def cells(state: str) -> list[str]:
            return [cell.id for node in self._plan.nodes if self._state[node.id] == state for cell in node.cells]

        return Outcome(cells("done"), cells("failed"), cells("blocked"), self._failures)
