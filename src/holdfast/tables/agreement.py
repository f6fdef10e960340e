"""The paper's figures beside ours, and how far the two order the defenses alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from holdfast.tables.reported import Reported
from holdfast.tables.table import Row, Section, Table

FEWEST = 3  # two defenses always agree or disagree completely


def beside(table: Table, reported: Reported) -> Table:
    """The table with the paper's figure in every cell that has one, and notes on model and agreement.

    Of several rows of one defense (own labels) the first, which is the plain one, stands beside the paper's.
    """
    sections, notes = [], list(table.notes)
    for section in table.sections:
        taken: set[tuple[str, str, str]] = set()
        rows = []
        for row in section.rows:
            key = (row.defense, row.align, row.setting)
            rows.append(row if key in taken else _row(table.name, section.model, row, reported))
            taken.add(key)
        sections.append(replace(section, rows=tuple(rows)))
    found = replace(table, sections=tuple(sections))
    if found.has_published:
        notes += _models(found, reported) + [line for section in sections for line in _orders(found, section)]
    return replace(found, notes=tuple(notes))


def average_ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Ranks from 1 with ties sharing their mean rank."""
    x = np.asarray(values, dtype=np.float64)
    smaller = (x[None, :] < x[:, None]).sum(axis=1)
    equal = (x[None, :] == x[:, None]).sum(axis=1)
    return np.asarray(smaller + (equal + 1) / 2, dtype=np.float64)


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Rank correlation: Pearson's correlation of average ranks; None where one side is constant."""
    a, b = (ranks - ranks.mean() for ranks in (average_ranks(one), average_ranks(other)))
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale > 0 else None


def _row(table: str, model: str, row: Row, reported: Reported) -> Row:
    cells = (replace(cell, published=reported.find(table, model, row, cell)) for cell in row.cells)
    return replace(row, cells=tuple(cells))


def _models(table: Table, reported: Reported) -> list[str]:
    names = dict.fromkeys(
        (section.model, reported.counterpart(section.model))
        for section in table.sections
        if any(cell.published for row in section.rows for cell in row.cells)
    )
    return [f"{model} stands beside the paper's {other}" for model, other in names if model != other]


def _orders(table: Table, section: Section) -> list[str]:
    """One line a section: Spearman's rank correlation of the defenses in each column."""
    found = []
    for j, column in enumerate(table.columns):
        pairs = [
            (cell.mean, cell.published.mean)
            for row in section.rows
            if (cell := row.cells[j]).mean is not None and cell.published is not None and not row.is_reference
        ]
        if len(pairs) >= FEWEST:
            value = spearman([ours for ours, _ in pairs if ours is not None], [theirs for _, theirs in pairs])
            name = f"{column.group} {column.shown.title}".strip()
            found.append((len(pairs), f"{name} {'undefined' if value is None else f'{value:+.2f}'}"))
    prefix = f"{section.title}: " if section.title else ""
    return [
        f"{prefix}order of {count} rows against the paper's, Spearman: {', '.join(x for n, x in found if n == count)}"
        for count in sorted({n for n, _ in found}, reverse=True)
    ]
