"""What stands under a table: missing figures and numbers of seeds, so that nothing is dropped silently."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.tables.table import Column, Section

NAMED = 6  # rows named before a note says how many more


def missing_note(sections: Sequence[Section]) -> list[str]:
    """How many figures are missing."""
    cells = [cell for section in sections for row in section.rows for cell in row.cells]
    missing = sum(cell.mean is None for cell in cells)
    return [f"{missing} of {len(cells)} figures are missing, shown as -"] if missing else []


def seed_notes(sections: Sequence[Section], columns: Sequence[Column]) -> list[str]:
    """How many seeds the means are over, and which rows have fewer."""
    counts: dict[str, list[int]] = {}
    for section in sections:
        for row in section.rows:
            for cell, column in zip(row.cells, columns, strict=True):
                if cell.seeds and not row.is_reference:
                    where = " / ".join(part for part in (section.title, row.label, column.group) if part)
                    counts.setdefault(where, []).append(cell.seeds)
    most = max((max(seen) for seen in counts.values()), default=0)
    if most < 2:
        return ["one seed"] if most else []
    fewer = [f"{where} ({min(seen)})" for where, seen in counts.items() if min(seen) < most]
    rest = f" and {len(fewer) - NAMED} more" if len(fewer) > NAMED else ""
    found = [f"mean ± sample standard deviation over {most} seeds"]
    return found + ([f"fewer seeds: {', '.join(fewer[:NAMED])}{rest}"] if fewer else [])
