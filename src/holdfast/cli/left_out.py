"""Rows that a run does not use, as lines: skipped as malformed, dropped as duplicates, kept in contradiction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def left_out(counts: Mapping[str, Any]) -> list[str]:
    """One line for every kind of row in every file of which there is any, and one for each skipped row that is named.

    Args:
        counts: of `holdfast.stages.prepare.row_counts`, or of a result that has them.
    """
    blocks = {"task": counts["task"], **counts["safety"]}
    if "harmful" in counts:
        blocks["harmful"] = counts["harmful"]
    return [line for name, entry in blocks.items() for line in _lines(name, entry)]


def _lines(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    if skipped := entry["skipped"]:
        named = entry.get("skipped_rows", [])
        more = f", the first {len(named)}" if len(named) < skipped else ""
        yield f"{name}: {_counted(skipped, 'malformed row')} skipped{more}:"
        yield from (f"  {row}" for row in named)
    if dropped := entry.get("duplicates_dropped", 0):
        yield f"{name}: {_counted(dropped, 'duplicate row')} dropped (prompt and completion of an earlier row)"
    if prompts := entry.get("contradictory_prompts", 0):
        yield f"{name}: {_counted(prompts, 'prompt')} with more than one completion; all are kept"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
