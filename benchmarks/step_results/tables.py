"""A stored benchmark as markdown tables, one per shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from holdfast.core.errors import DataError

HEAD = "| path | checkpointing | median (ms) | p90 (ms) | x TRL | peak (MiB) | x TRL | tokens/s |"
RULE = "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"


def read_record(path: Path) -> dict[str, Any]:
    """A result that `holdfast bench` wrote.

    Raises:
        DataError: the file is missing or is something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", remedy="give a file that holdfast bench wrote") from error
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        raise DataError(f"{path} has no rows", remedy="give a file that holdfast bench wrote")
    return found


def markdown(record: dict[str, Any]) -> str:
    """Every row; those that failed with their error; the baseline measured again; the reference pass."""
    parts = []
    for shape in dict.fromkeys(row["shape"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["shape"] == shape]
        swept = [f"{row['sweep']} = {row['value']}" if "sweep" in row else "" for row in rows]
        lines = [_line(row, extra) for row, extra in zip(rows, swept, strict=True)]
        parts.append("\n".join([f"**{shape}**", "", HEAD, RULE, *lines, *_notes(record, shape)]))
    return "\n\n".join(parts)


def _line(row: dict[str, Any], extra: str) -> str:
    name = f"{row['path']}, {extra}" if extra else row["path"]
    mode = "on" if row["checkpointing"] else "off"
    if "error" in row:
        return f"| {name} | {mode} | failed: {row['error']} | | | | | |"
    cells = (
        (row["median_ms"], ".1f"), (row["p90_ms"], ".1f"), (row["x_trl_sft"], ".2f"), (row["peak_mib"], ".0f"),
        (row["x_memory"], ".2f"), (row["tokens_per_s"], ".0f"),
    )  # fmt: skip
    return f"| {name} | {mode} | " + " | ".join("-" if x is None else format(x, form) for x, form in cells) + " |"


def _notes(record: dict[str, Any], shape: str) -> list[str]:
    notes = []
    drift = [d for d in record["drift"] if d["shape"] == shape]
    if drift:
        again = ", ".join(f"{'on' if d['checkpointing'] else 'off'}: {d['x_first']:.2f}" for d in drift)
        notes.append(f"trl_sft measured again at the end, x its first figure (checkpointing {again}).")
    for one in record["reference"]:
        if one["shape"] == shape and "error" not in one:
            speed, share = f"{one['tokens_per_s']:.0f} tokens/s", f"{100 * one['share']:.0f} %"
            notes.append(f"Reference losses: {speed}, {share} of bare forward passes.")
    return ["", " ".join(notes)] if notes else []
