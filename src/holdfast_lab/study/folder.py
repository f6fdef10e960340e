"""The folder of a study, which is also its memory: what exists there is done, and is never done again.

study.json                 the study, its protocol, and the state of every cell when it was last started or ended
events.jsonl               the journal: start, finish and failure of every piece of work since, with times
results/CELL.json          one per finished cell, written as the last act
errors/CELL.json           one per failed cell: kind of error, message, exit code
alignments/ID/, cells/ID/  where the work is done: node.json, outcome.json, log.txt and what the work itself writes
shared/                    what several cells of one model share
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import CheckpointError
from holdfast.core.files import read_json, write_json
from holdfast.core.hashing import same_numbers, sha256_json

if TYPE_CHECKING:  # a worker needs no cells, and starts in half the time
    from holdfast_lab.study.cells import Cell, Node

VERSION = 1
NODE, OUTCOME, LOG = "node.json", "outcome.json", "log.txt"


class StudyFolder:
    """Paths of a study's folder, and what is known from the files in it."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.record = self.root / "study.json"
        self.events = self.root / "events.jsonl"
        self.results = self.root / "results"
        self.errors = self.root / "errors"
        self.shared = self.root / "shared"

    def place(self, node: Node) -> Path:
        return self.root / ("alignments" if node.is_alignment else "cells") / node.id

    def error_files(self, node: Node) -> list[Path]:
        """The files that say why a node failed: one a cell, since tables look for cells."""
        names = [f"alignments/{node.id}"] if node.is_alignment else [cell.id for cell in node.cells]
        return [self.errors / f"{name}.json" for name in names]

    def require_protocol(self, protocol: Mapping[str, Any]) -> dict[str, Any]:
        """Refuse a folder whose study follows another protocol; other cells of the same protocol are welcome.

        Returns the protocol as the study began with it: 3 and 3.0 are one setting, but would not hash alike.
        """
        if not self.record.exists():
            return dict(protocol)
        known = read_json(self.record)
        before = known.get("protocol") if isinstance(known, dict) and known.get("version") == VERSION else None
        if not isinstance(before, dict):
            raise CheckpointError(f"{self.record} is not the record of a study", remedy="choose another output_dir")
        if different := differences(before, protocol):
            raise CheckpointError(
                f"{self.root} holds a study with another protocol: {', '.join(different[:5])} differ",
                remedy="choose another output_dir, or restore the protocol that it was started with",
            )
        return before

    def finished(self, node: Node) -> bool:
        """Whether a node is done: its outcome is there, or the results of all its cells."""
        return (self.place(node) / OUTCOME).exists() or not (node.is_alignment or self._missing(node))

    def publish(self, node: Node) -> None:
        """Write the results that a finished node still lacks: its process was killed, or a label is new."""
        for cell in self._missing(node):
            write_json(self.results / f"{cell.id}.json", {**read_json(self.place(node) / OUTCOME), **cell.names()})

    def _missing(self, node: Node) -> list[Cell]:
        def has_result(cell: Cell) -> bool:
            file = self.results / f"{cell.id}.json"
            stored = read_json(file) if file.exists() else None
            if stored is not None and (not isinstance(stored, dict) or stored.get("cell") != cell.id):
                remedy = "delete the file to run the cell again"
                raise CheckpointError(f"{file} is not the result of {cell.id}", remedy=remedy)
            return stored is not None

        return [cell for cell in node.cells if not has_result(cell)]

    def failure(self, node: Node) -> dict[str, Any] | None:
        """Why a node failed earlier; None when it did not, or when one of its cells is new."""
        files = self.error_files(node)
        if not all(file.exists() for file in files):
            return None
        found = read_json(files[0])
        if not isinstance(found, dict) or not isinstance(found.get("exit_code"), int):
            raise CheckpointError(f"{files[0]} is not the record of a failure", remedy="delete the file")
        return found

    def forget_failure(self, node: Node) -> None:
        for file in self.error_files(node):
            file.unlink(missing_ok=True)

    def write_node(self, node: Node, *, call: str, protocol: Mapping[str, object]) -> Path:
        """Write what a worker needs to know, and return the file."""
        alignment = node.alignment
        if node.is_alignment and alignment is not None:
            work: dict[str, Any] = {"model": asdict(alignment.model), "align": alignment.name}
        else:
            aligned = None if alignment is None else str(self.root / "alignments" / alignment.id)
            work = {"cell": asdict(node.cells[0]), "aligned": aligned}
        file = self.place(node) / NODE
        write_json(file, {
            "version": VERSION, "id": node.id, "call": call, "protocol": protocol, "shared": str(self.shared),
            "results": {str(self.results / f"{cell.id}.json"): cell.names() for cell in node.cells},
            "errors": [str(file) for file in self.error_files(node)], **work,
        })  # fmt: skip
        return file

    def write_record(
        self, study: Mapping[str, object], protocol: Mapping[str, object], states: Mapping[str, object]
    ) -> None:
        digest = sha256_json(same_numbers(protocol))
        value = {"version": VERSION, "study": study, "protocol": protocol, "protocol_sha256": digest, **states}
        write_json(self.record, value)


def differences(before: object, after: object, key: str = "") -> list[str]:
    """Dotted keys at which two JSON values differ; 10 and 10.0 are equal."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        keys = sorted({*before, *after})
        return [k for name in keys for k in differences(before.get(name), after.get(name), f"{key}.{name}".strip("."))]
    return [] if same_numbers(before) == same_numbers(after) else [key]
