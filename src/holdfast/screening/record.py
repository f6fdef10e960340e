"""A screening on disk, in the run folder: fixed before the first step, read again by every resume and every rank.

| file            |                                                                                  |
|-----------------|----------------------------------------------------------------------------------|
| screening.json  | sealed: what it belongs to, counts, dropped rows, sha256 of the other files; no text |
| conflicts.jsonl | row number, id, place, form and group of every conflict; no text                 |
| held.jsonl      | prompts and replies by set and role; the owner's alone                           |
| monitor.jsonl   | prompts by figure; the owner's alone                                             |
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.core.errors import CheckpointError
from holdfast.core.files import read_plain_file, write_text
from holdfast.core.hashing import sha256_json, sha256_lines, sha256_text
from holdfast.core.sealed_json import read_sealed, write_sealed
from holdfast.data.examples import Example, Turns, completion_text, make_example
from holdfast.data.prompts import prompt_key
from holdfast.data.splits import ROLES, Split, split_from_roles
from holdfast.screening.conflicts import Conflict
from holdfast.screening.monitor_prompts import MonitorPrompts
from holdfast.screening.screen import Screening

FOLDER = "screening"
RECORD = "screening.json"
VERSION = 1
OWNER = 0o600
FIGURES = ("refusals", "unseen", "answers")
OF_VERSION = ("rules_revision", "bundled_sha256")
"""Of what a screening belongs to: what the version of holdfast brings."""
_REMEDY = "restore the folder from a backup, or train in a new output_dir"


def task_sha256(rows: Sequence[Example]) -> str:
    """Of the rows' ids, in order."""
    return sha256_lines(row.id for row in rows)


def content_sha256(rows: Sequence[Example]) -> str:
    """Of the rows' prompts and replies, in any order and each once: what a ledger knows a task by.

    Neither another order or template nor a row that is repeated makes another task.
    """
    return sha256_lines(sorted({sha256_json([prompt_key(row), completion_text(row)]) for row in rows}))


def save(folder: Path, screening: Screening, belongs_to: Mapping[str, Any]) -> None:
    """Write a screening; its record last, so that a folder with a record is whole.

    Args:
        folder: made if it is not there.
        belongs_to: what a later run must share to use it: model, task, settings; JSON.
    """
    texts = {
        "conflicts.jsonl": "".join(_line(one.to_json()) for one in screening.conflicts),
        "held.jsonl": "".join(map(_line, _held(screening.sets))),
        "monitor.jsonl": "".join(map(_line, _monitored(screening.monitor))),
    }
    for name, text in texts.items():
        write_text(folder / name, text, mode=OWNER)
    values = {
        "version": VERSION, "belongs_to": dict(belongs_to), "rows": screening.rows,
        "asked_rows": screening.asked_rows, "unaskable": screening.unaskable, "classes": screening.classes,
        "rule": screening.rule, "counts": screening.counts,
        "files": {name: sha256_text(text) for name, text in texts.items()},
    }  # fmt: skip
    write_sealed(folder / RECORD, values)


def is_saved(folder: Path) -> bool:
    """Whether a whole screening lies here."""
    return (folder / RECORD).exists()


def load(folder: Path, belongs_to: Mapping[str, Any]) -> Screening:
    """Read a screening that belongs to this run.

    Raises:
        CheckpointError: it is damaged, or belongs to another model, task or settings (they are named).
    """
    values = _values(folder)
    wanted = json.loads(json.dumps(dict(belongs_to)))
    there = values["belongs_to"]
    if differing := sorted(key for key in {*there, *wanted} if there.get(key) != wanted.get(key)):
        raise CheckpointError(
            f"{folder} holds the screening of another run; differing: {', '.join(differing)}",
            remedy="use the same model, task and settings as before, or a new output_dir",
        )
    return _screening(folder, values)


def load_finished(
    folder: Path, belongs_to: Mapping[str, Any] | None = None, places: Mapping[str, str] | None = None
) -> tuple[Screening, dict[str, Any]]:
    """Read the screening of a finished run, and what it belongs to.

    The rules and bundled prompts of this version may be others than the run's: the sets stay what they were.

    Args:
        belongs_to: what is there now of what it was made from; None compares nothing.
        places: what to call differing parts in the error: where the task and the model are.

    Raises:
        CheckpointError: it is missing or damaged, or something that it was made from was changed (it is named).
    """
    values = _values(folder)
    there: dict[str, Any] = values["belongs_to"]
    wanted = there if belongs_to is None else json.loads(json.dumps(dict(belongs_to)))
    changed = sorted(key for key in {*there, *wanted} - {*OF_VERSION} if there.get(key) != wanted.get(key))
    if changed:
        names = dict.fromkeys((places or {}).get(key, f"the setting {key}") for key in changed)
        raise CheckpointError(
            f"changed since {folder} was written before training: {', '.join(names)}",
            remedy="restore it: the evidence of a run rests on what it was made from",
        )
    return _screening(folder, values), there


def _values(folder: Path) -> dict[str, Any]:
    values = read_sealed(folder / RECORD, remedy=_REMEDY)
    if values.get("version") != VERSION:
        raise CheckpointError(f"{folder / RECORD} is of another version of holdfast", remedy=_REMEDY)
    if not isinstance(values.get("belongs_to"), dict) or not isinstance(values.get("files"), dict):
        raise CheckpointError(f"{folder / RECORD} is not the record of a screening", remedy=_REMEDY)
    return values


def _screening(folder: Path, values: Mapping[str, Any]) -> Screening:
    rows = {name: _rows(folder / name, digest) for name, digest in values["files"].items()}
    conflicts = tuple(Conflict(**row) for row in rows["conflicts.jsonl"])
    return Screening(
        rows=values["rows"], asked_rows=values["asked_rows"], unaskable=values["unaskable"],
        classes=values["classes"], conflicts=conflicts, rule=values["rule"], sets=_splits(rows["held.jsonl"]),
        monitor=_monitor(rows["monitor.jsonl"]), counts=values["counts"],
    )  # fmt: skip


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True) + "\n"


def _held(sets: Mapping[str, Split]) -> Iterator[dict[str, Any]]:
    for name, split in sets.items():
        for role, examples in split.roles.items():
            for example in examples:
                yield {"set": name, "role": role, **_example(example)}


def _monitored(monitor: MonitorPrompts) -> Iterator[dict[str, Any]]:
    for figure in FIGURES:
        for example in getattr(monitor, figure):
            yield {"figure": figure, **_example(example)}


def _example(example: Example) -> dict[str, Any]:
    return {
        "prompt": example.prompt, "completion": example.completion, "where": example.where,
        "category": example.category,
    }  # fmt: skip


def _read(row: Mapping[str, Any]) -> Example:
    def side(value: str | list[dict[str, str]]) -> str | Turns:
        return value if isinstance(value, str) else tuple(value)

    return make_example(side(row["prompt"]), side(row["completion"]), row["where"], row["category"])


def _rows(path: Path, digest: str) -> list[dict[str, Any]]:
    data = read_plain_file(path, remedy=_REMEDY)
    text = data.decode("utf-8", "replace")
    if sha256_text(text) != digest:
        raise CheckpointError(f"{path} was changed: its content does not match the record", remedy=_REMEDY)
    return [json.loads(line) for line in text.splitlines()]


def _splits(rows: Sequence[Mapping[str, Any]]) -> dict[str, Split]:
    found: dict[str, dict[str, list[Example]]] = {}
    for row in rows:
        found.setdefault(row["set"], {role: [] for role in ROLES})[row["role"]].append(_read(row))
    return {name: split_from_roles(*(roles[role] for role in ROLES)) for name, roles in found.items()}


def _monitor(rows: Sequence[Mapping[str, Any]]) -> MonitorPrompts:
    by_figure = {figure: tuple(_read(row) for row in rows if row["figure"] == figure) for figure in FIGURES}
    return MonitorPrompts(**by_figure)
