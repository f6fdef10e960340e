"""The files of `holdfast screen`: kept rows and sets in formats that any trainer reads."""

from __future__ import annotations

import json
from pathlib import Path

from holdfast.core.files import write_json, write_text
from holdfast.data.examples import Example, to_rows
from holdfast.screening.conflicts import write_conflicts
from holdfast.screening.screen import Screening

OWNER = 0o600


def export(folder: Path, screening: Screening, rows: list[Example], *, model: str) -> list[str]:
    """Write every file, for its owner alone; returns their names.

    | file            |                                                                       |
    |-----------------|-----------------------------------------------------------------------|
    | kept.jsonl      | the rows without conflicts, as prompt/completion or text              |
    | conflicts.jsonl | row number, id, place, form and group; no text                        |
    | NAME.jsonl      | what to hold: prompts with the model's own replies, and their role    |
    | monitor.jsonl   | what to watch: prompts by figure                                      |
    | figures.json    | counts; no text                                                       |
    """
    conflicting = {one.row for one in screening.conflicts}
    kept = [row for number, row in enumerate(rows) if number not in conflicting]
    files = {"kept.jsonl": _lines(to_rows(kept))}
    for name, split in screening.sets.items():
        held = [(role, example) for role in ("constraint", "monitor") for example in split.roles[role]]
        pairs = to_rows([example for _, example in held])
        files[f"{name}.jsonl"] = _lines(
            [row | {"role": role, "category": e.category} for row, (role, e) in zip(pairs, held, strict=True)]
        )
    watched = [(figure, e) for figure in ("refusals", "unseen", "answers") for e in getattr(screening.monitor, figure)]
    files["monitor.jsonl"] = _lines(
        [{"figure": figure, "prompt": e.prompt, "category": e.category} for figure, e in watched]
    )
    for name, text in files.items():
        write_text(folder / name, text, mode=OWNER)
    write_conflicts(folder / "conflicts.jsonl", screening.conflicts)
    write_json(folder / "figures.json", {"model": model, **screening.figures()})
    return [*files, "conflicts.jsonl", "figures.json"]


def _lines(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
