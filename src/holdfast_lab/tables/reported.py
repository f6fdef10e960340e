"""The paper's own figures beside ours, and how far both order the defenses alike.

They are read from a file at report time: never part of the package.
"""

import csv
import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.registry import nearest
from holdfast_lab.tables.kinds import parse_setting
from holdfast_lab.tables.table import Cell, Published, Row, Section, Table

REPORTED = "HOLDFAST_REPORTED"
FEWEST = 3  # rows that are ordered: two always agree or disagree completely

COLUMNS = ("table", "model", "task", "poison_ratio", "method", "setting", "metric", "mean", "std")
# The paper's names that are not a defense's own; (defense, alignment), None where the alignment is the usual one.
METHODS: dict[str, tuple[str, str | None]] = {
    "Aligned (SFT)": ("aligned", "sft"), "SFT-Aligned": ("aligned", "sft"), "Antibody-Aligned": ("aligned", "antibody"),
    "Ours": ("holdfast", None), "Our method": ("holdfast", None),
    "Ours on SFT-Aligned": ("holdfast", "sft"), "Ours on Antibody-Aligned": ("holdfast", "antibody"),
}  # fmt: skip
Key = tuple[str, str, str, str, str, str]  # table, model, task, defense, setting, metric


@dataclass(frozen=True)
class Figure:
    """One reported figure with what the key leaves out: alignment and poison ratio, None where any will do."""

    align: str | None
    poison_ratio: float | None
    published: Published


@dataclass(frozen=True)
class Reported:
    """The paper's figures, and which of its models stands for a model that it does not have."""

    figures: Mapping[Key, list[Figure]]
    models: tuple[str, ...]  # the paper's models, in its order
    stand_in: str | None = None  # chosen by the user; None shows nothing beside models that the paper does not have

    def counterpart(self, model: str) -> str | None:
        """The paper's name of a model, the stand-in where it has none."""
        return next((name for name in self.models if _plain(name) == _plain(model)), self.stand_in)

    def find(self, table: str, model: str, row: Row, cell: Cell) -> Published | None:
        """The paper's figure for a cell: same table, task, defense, alignment, setting, metric and poison ratio."""
        name = self.counterpart(model)
        if name is None:
            return None
        for one in self.figures.get((table, name, cell.task, row.defense, _setting(row.setting), cell.metric), ()):
            same_ratio = row.is_reference or one.poison_ratio in (None, cell.poison_ratio)
            usual = row.align in (("sft", row.defense) if one.align is None else (one.align,))
            if same_ratio and (usual or row.defense == "base"):
                return one.published
        return None


def find_reported(path: Path | None, stand_in: str | None) -> Reported | None:
    """The figures of `path`, of HOLDFAST_REPORTED where none is given, or None."""
    if place := path or os.environ.get(REPORTED):
        return read_reported(Path(place), stand_in)
    if stand_in is not None:
        what = f"--reported-model {stand_in} without reported figures"
        raise ConfigError(what, remedy=f"give --reported PATH, or set {REPORTED}")
    return None


def read_reported(path: Path, stand_in: str | None = None) -> Reported:
    if not path.is_file():
        raise ConfigError(
            f"{path} is not a file, expected the paper's reported figures (CSV)",
            remedy="correct --reported or HOLDFAST_REPORTED, or unset it to show no figures of the paper",
        )
    figures = defaultdict[Key, list[Figure]](list)
    models: dict[str, None] = {}
    with path.open(encoding="utf-8", newline="") as handle:
        rows = csv.DictReader(handle)
        missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
        if missing:
            what = f"{path}: no column {missing[0]!r}, expected {', '.join(COLUMNS)}"
            raise DataError(what, remedy="name the right file")
        for row in rows:
            where = f"{path}:{rows.line_num}"
            method = row["method"]
            defense, align = METHODS.get(method, (re.sub(r"\W+", "_", method.lower()), None))
            key = (row["table"], row["model"], row["task"], defense, _setting(row["setting"]), row["metric"])
            mean = _number(row["mean"], where, "mean")
            if mean is None:
                continue
            ratio = None if row["poison_ratio"] in ("", "any") else _number(row["poison_ratio"], where, "poison_ratio")
            figures[key].append(Figure(align, ratio, Published(mean, _number(row["std"], where, "std"))))
            models.setdefault(row["model"])
    if stand_in is not None and stand_in not in models:
        raise ConfigError(f"{path} reports no model {stand_in!r}", remedy=nearest(stand_in, list(models)))
    return Reported(figures, tuple(models), stand_in)


def _setting(setting: str) -> str:
    """`tau=0.10` and `tau=0.1` are one setting."""
    name, value = parse_setting(setting)
    try:
        return f"{name}={float(value):g}"
    except ValueError:
        return setting


def _number(text: str | None, where: str, column: str) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{where}: {column} is not a finite number", remedy="restore the file from its source")
    return value


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _key(row: Row) -> tuple[str, str, str]:
    return row.defense, row.align, row.setting


def beside(table: Table, reported: Reported) -> Table:
    """The table with the paper's figure in every cell that has one, and notes on model and agreement.

    Of several rows of one defense (own labels) the first, which is the plain one, is compared with the paper's.
    """

    def compared(section: Section, row: Row) -> Row:
        found = (replace(cell, published=reported.find(table.name, section.model, row, cell)) for cell in row.cells)
        return replace(row, cells=tuple(found))

    sections = []
    for section in table.sections:
        first = {_key(row): row for row in reversed(section.rows)}
        rows = (compared(section, row) if row is first[_key(row)] else row for row in section.rows)
        sections.append(replace(section, rows=tuple(rows)))
    found = replace(table, sections=tuple(sections))
    if not found.has_published:
        return found
    orders = [line for section in sections for line in _orders(found, section)]
    return replace(found, notes=(*table.notes, *_models(found, reported), *orders))


def spearman(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Rank correlation: Pearson's correlation of average ranks; None where one side is constant."""
    from scipy.stats import spearmanr  # slow to import

    return None if min(len(set(ours)), len(set(theirs))) < 2 else float(spearmanr(ours, theirs).statistic)


def _models(table: Table, reported: Reported) -> list[str]:
    names = dict.fromkeys(
        (section.model, reported.counterpart(section.model))
        for section in table.sections
        if any(cell.published for row in section.rows for cell in row.cells)
    )
    return [f"{model} is compared with the paper's {other}" for model, other in names if model != other]


def _orders(table: Table, section: Section) -> list[str]:
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
