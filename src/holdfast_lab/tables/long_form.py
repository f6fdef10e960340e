"""Tables as rows of one figure each, in the columns of the paper's reported figures: CSV and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from holdfast_lab.tables.layout import Style
from holdfast_lab.tables.table import Table

COLUMNS = ("table", "model", "task", "poison_ratio", "method", "setting", "metric", "mean", "std", "n_seeds")
INTERVAL = ("low", "high")
PUBLISHED = ("paper_mean", "paper_std")
ANY = "any"  # the references do not depend on the poison ratio


def records(table: Table) -> list[dict[str, Any]]:
    """One record a figure, missing ones with mean None; a reference that stands under several ratios comes once."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for section in table.sections:
        for row in section.rows:
            for cell in row.cells:
                ratio = ANY if row.is_reference else cell.poison_ratio
                key = (table.name, section.model, cell.task, ratio, row.label, row.setting, cell.metric)
                paper = cell.published
                record = dict(zip(COLUMNS, key, strict=False)) | {
                    "mean": cell.mean, "std": cell.std, "n_seeds": cell.seeds, "low": cell.low, "high": cell.high,
                    "mark": cell.mark, "paper_mean": paper and paper.mean, "paper_std": paper and paper.std,
                }  # fmt: skip
                # A default whose values are unknown is in every section of a sweep, on that section's seeds.
                found.setdefault((*key, section.title), record)
    return list(found.values())


def long_form(tables: Sequence[Table], style: Style) -> str:
    """CSV with a header; intervals and the paper's figures have columns where they are asked for or there."""
    published = any(table.has_published for table in tables)
    columns = [*COLUMNS, *(INTERVAL if style.intervals else ()), *(PUBLISHED if published else ())]
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for table in tables:
        for record in records(table):
            writer.writerow({k: f"{v:.10g}" if isinstance(v, float) else v for k, v in record.items()})
    return out.getvalue()
