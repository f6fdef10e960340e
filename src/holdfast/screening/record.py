"""A screening on disk, in the run folder: fixed before the first step, read again by every resume and every rank.

| file            |                                                                                  |
|-----------------|----------------------------------------------------------------------------------|
| screening.json  | sealed: what it belongs to, counts, dropped rows, sha256 of the other files; no text |
| conflicts.jsonl | line and row number, id, place, form and group of every conflict; no text        |
| held.jsonl      | prompts and replies by set and role; the owner's alone                           |
| monitor.jsonl   | prompts by figure; the owner's alone                                             |
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from holdfast.core.errors import CheckpointError
from holdfast.core.files import read_plain_file, write_json, write_parts, write_text
from holdfast.core.hashing import sha256_text
from holdfast.core.ranks import from_first
from holdfast.core.sealed_json import read_sealed, write_sealed
from holdfast.data.examples import Example, each_row, make_example, to_rows
from holdfast.data.split_record import ROLES
from holdfast.data.splits import split_from_roles
from holdfast.screening.conflicts import Conflict, write_conflicts
from holdfast.screening.screen import Screening
from holdfast.screening.sets import MonitorPrompts

FOLDER = "screening"
RECORD = "screening.json"
VERSION = 1
OWNER = 0o600
FIGURES = ("refusals", "unseen", "answers")
FIELDS = ("rows", "asked_rows", "unaskable", "classes", "rule", "counts")  # of a screening, as they are in the record
OF_VERSION = ("rules_revision", "bundled_sha256")  # of what a screening belongs to: what holdfast's version brings
_REMEDY = "restore the folder from a backup, or train in a new output_dir"


def save(folder: Path, screening: Screening, belongs_to: Mapping[str, Any]) -> None:
    """Write a screening; its record last, so that a folder with a record is whole.

    `belongs_to` is what a later run must share to use it: model, task, settings; JSON.
    """
    roles = [(name, role, own) for name, split in screening.sets.items() for role, own in split.roles.items()]
    rows = {
        "conflicts.jsonl": [conflict.to_json() for conflict in screening.conflicts],
        "held.jsonl": [{"set": name, "role": role, **_example(e)} for name, role, own in roles for e in own],
        "monitor.jsonl": [{"figure": f, **_example(e)} for f in FIGURES for e in getattr(screening.monitor, f)],
    }
    texts = {name: _lines(found, sort_keys=True) for name, found in rows.items()}
    for name, text in texts.items():
        write_text(folder / name, text, mode=OWNER)
    values = {"version": VERSION, "belongs_to": dict(belongs_to)} | {k: getattr(screening, k) for k in FIELDS}
    write_sealed(folder / RECORD, values | {"files": {name: sha256_text(text) for name, text in texts.items()}})


def load(folder: Path, belongs_to: Mapping[str, Any]) -> Screening:
    """Read a screening that belongs to this run."""
    values = _values(folder)
    if differing := _differing(values["belongs_to"], belongs_to):
        what = f"{folder} holds the screening of another run; differing: {', '.join(differing)}"
        raise CheckpointError(what, remedy="use the same model, task and settings as before, or a new output_dir")
    return _screening(folder, values)


def load_finished(
    folder: Path, belongs_to: Mapping[str, Any] | None = None, places: Mapping[str, str] | None = None
) -> tuple[Screening, dict[str, Any]]:
    """Read the screening of a finished run, and what it belongs to.

    The rules and bundled prompts of this version may be others than the run's: the sets stay what they were. `places`
    says where the task and the model are, for the error about what has changed.
    """
    values = _values(folder)
    there: dict[str, Any] = values["belongs_to"]
    differing = [] if belongs_to is None else _differing(there, belongs_to)
    if changed := [key for key in differing if key not in OF_VERSION]:
        names = dict.fromkeys((places or {}).get(key, f"the setting {key}") for key in changed)
        what = f"changed since {folder} was written before training: {', '.join(names)}"
        raise CheckpointError(what, remedy="restore it: the evidence of a run rests on what it was made from")
    return _screening(folder, values), there


def _differing(there: Mapping[str, Any], belongs_to: Mapping[str, Any]) -> list[str]:
    wanted = json.loads(json.dumps(dict(belongs_to)))
    return sorted(key for key in {*there, *wanted} if there.get(key) != wanted.get(key))


def _values(folder: Path) -> dict[str, Any]:
    values = read_sealed(folder / RECORD, remedy=_REMEDY)
    if values.get("version") != VERSION:
        raise CheckpointError(f"{folder / RECORD} is of another version of holdfast", remedy=_REMEDY)
    if not isinstance(values.get("belongs_to"), dict) or not isinstance(values.get("files"), dict):
        raise CheckpointError(f"{folder / RECORD} is not the record of a screening", remedy=_REMEDY)
    return values


def _screening(folder: Path, values: Mapping[str, Any]) -> Screening:
    rows = {name: _rows(folder / name, digest) for name, digest in values["files"].items()}
    sets: dict[str, dict[str, list[Example]]] = {}
    for row in rows["held.jsonl"]:
        sets.setdefault(row["set"], {role: [] for role in ROLES})[row["role"]].append(_read(row))
    watched = {f: tuple(_read(row) for row in rows["monitor.jsonl"] if row["figure"] == f) for f in FIGURES}
    return Screening(
        conflicts=tuple(Conflict.from_json(row) for row in rows["conflicts.jsonl"]),
        sets={name: split_from_roles(*(roles[role] for role in ROLES)) for name, roles in sets.items()},
        monitor=MonitorPrompts(**watched),
        **{name: values[name] for name in FIELDS},
    )


def _example(example: Example) -> dict[str, Any]:
    return {name: getattr(example, name) for name in ("prompt", "completion", "where", "category")}


def _read(row: Mapping[str, Any]) -> Example:
    prompt, completion = (v if isinstance(v, str) else tuple(v) for v in (row["prompt"], row["completion"]))
    return make_example(prompt, completion, row["where"], row["category"])


def _rows(path: Path, digest: str) -> list[dict[str, Any]]:
    text = read_plain_file(path, remedy=_REMEDY).decode("utf-8", "replace")
    if sha256_text(text) != digest:
        raise CheckpointError(f"{path} was changed: its content does not match the record", remedy=_REMEDY)
    return [json.loads(line) for line in text.splitlines()]


def fixed_screening(
    folder: Path, belongs_to: Mapping[str, Any], make: Callable[[], Screening], *, started: bool
) -> Screening:
    """The screening in `folder`, made there first where there is none."""

    def provide() -> None:
        saved = (folder / RECORD).exists()
        if started and not saved:
            what = f"{folder} is missing, and training has begun: asking again could give other sets"
            raise CheckpointError(what, remedy=_REMEDY)
        try:
            if saved:
                load(folder, belongs_to)
        except CheckpointError:
            if started:
                raise
            saved = False
        if not saved:
            save(folder, make(), belongs_to)

    from_first(provide)
    return load(folder, belongs_to)


def export(folder: Path, screening: Screening, rows: list[Example], *, model: str) -> list[str]:
    """The files of `holdfast screen`, in formats that any trainer reads, for their owner alone; returns their names.

    | file            |                                                                       |
    |-----------------|-----------------------------------------------------------------------|
    | kept.jsonl      | the rows without conflicts, as prompt/completion or text              |
    | conflicts.jsonl | line and row number, id, place, form and group; no text               |
    | NAME.jsonl      | what to hold: prompts with the model's own replies, and their role    |
    | monitor.jsonl   | what to watch: prompts by figure                                      |
    | figures.json    | counts; no text                                                       |
    """
    conflicting = {conflict.row for conflict in screening.conflicts}
    kept = [row for number, row in enumerate(rows) if number not in conflicting]
    # Line by line: as one text, a million rows take three times their size.
    write_parts(folder / "kept.jsonl", (f"{json.dumps(row)}\n".encode() for row in each_row(kept)), mode=OWNER)
    files = {}
    for name, split in screening.sets.items():
        held = [(role, example) for role in ("constraint", "monitor") for example in split.roles[role]]
        pairs = zip(to_rows([example for _, example in held]), held, strict=True)
        files[f"{name}.jsonl"] = _lines(row | {"role": role, "category": e.category} for row, (role, e) in pairs)
    watched = [(figure, e) for figure in FIGURES for e in getattr(screening.monitor, figure)]
    files["monitor.jsonl"] = _lines({"figure": f, "prompt": e.prompt, "category": e.category} for f, e in watched)
    for name, text in files.items():
        write_text(folder / name, text, mode=OWNER)
    write_conflicts(folder / "conflicts.jsonl", screening.conflicts)
    write_json(folder / "figures.json", {"model": model, **screening.figures()})
    return ["kept.jsonl", *files, "conflicts.jsonl", "figures.json"]


def _lines(rows: Iterable[Mapping[str, object]], *, sort_keys: bool = False) -> str:
    return "".join(json.dumps(row, sort_keys=sort_keys) + "\n" for row in rows)
