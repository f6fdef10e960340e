"""The results of a study: one JSON file per cell, read strictly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.errors import DataError
from holdfast.core.files import read_json

VERSION = 1
REFERENCES = ("base", "aligned")
REMEDY = "name the output_dir of `holdfast study`, or a folder that holds its result files and nothing else"


@dataclass(frozen=True)
class Measured:
    """One metric of one cell: its value, a confidence interval where there is one, and the sample size."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None


@dataclass(frozen=True)
class Result:
    """One cell of a study.

    Attributes:
        cell: its id.
        model: the name shown.
        defense: a name in DEFENSES, or `base` / `aligned` for the models before fine-tuning.
        label: what the row is called; equal to `defense` where the study gave no name.
        setting: what differs from the defense's default, e.g. `tau=0.05`; empty for the default.
        align: the alignment recipe, `sft` or a defense of the alignment stage.
        poison_ratio, seed: None for the references.
        constraint: tau, alpha and beta of the run where the result tells them.
        outcomes: of HS (harmful) and FA (right), a truth value per prompt, where the result tells them.
        kept_sha256: of the replies that the run was to keep: it tells alignments of one recipe apart.
        unit, majorizer: of the run's constraint, where the result tells them.
    """

    cell: str
    model: str
    task: str
    defense: str
    label: str
    setting: str
    align: str
    poison_ratio: float | None
    seed: int | None
    protocol_sha256: str
    protocol: Mapping[str, Any]
    metrics: Mapping[str, Measured]
    constraint: Mapping[str, float]
    path: Path
    outcomes: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
    kept_sha256: str | None = None
    unit: str | None = None
    majorizer: str | None = None

    @property
    def is_reference(self) -> bool:
        """Whether this is a model before fine-tuning: no seed, no poison, and never marked best."""
        return self.defense in REFERENCES


def read_results(folder: Path) -> list[Result]:
    """Read every result of a study's output_dir (its `results/`) or of a folder of results, by file name.

    Raises:
        DataError: no such folder, no results, a file that is not a result, or one cell in two files.
        CheckpointError: a file that is not JSON.
    """
    inside = folder / "results" if (folder / "results").is_dir() else folder
    if not inside.is_dir():
        raise DataError(f"{folder} is not a folder, expected the results of a study", remedy=REMEDY)
    if (folder / "config.yaml").is_file() and not (folder / "results").is_dir():
        raise DataError(f"{folder} is the folder of a run, expected the output_dir of a study", remedy=REMEDY)
    found = [parse_result(read_json(path), path) for path in sorted(inside.glob("*.json"))]
    if not found:
        raise DataError(f"{inside} holds no result (*.json)", remedy=REMEDY)
    require_distinct(found)
    return found


def require_distinct(results: Sequence[Result]) -> None:
    """Raises `DataError` when one cell comes twice, since its seed would count twice."""
    seen: dict[str, Path] = {}
    for result in results:
        if result.cell in seen:
            raise DataError(
                f"{seen[result.cell]} and {result.path} are both cell {result.cell!r}, expected each cell once",
                remedy="remove the copy",
            )
        seen[result.cell] = result.path


def failed_cells(folder: Path) -> list[str]:
    """Ids of the cells of a study's output_dir that failed and have no result."""
    failed = (path.stem for path in sorted((folder / "errors").glob("*.json")))
    return [cell for cell in failed if not (folder / "results" / f"{cell}.json").exists()]


def parse_result(value: Any, path: Path) -> Result:
    """One result from its JSON; unknown fields are left alone, missing or mistyped ones are refused by name."""
    if not isinstance(value, dict) or "version" not in value:
        raise DataError(f"{path} is not a result of a study: no field 'version'", remedy=REMEDY)
    if value["version"] != VERSION:
        raise DataError(
            f"{path}: version is {value['version']!r}, expected {VERSION}",
            remedy="use the holdfast that wrote it, or run the study again",
        )
    fields = _Fields(value, path)
    metrics = fields.get("metrics", dict)
    provenance = value.get("provenance")
    constraint = provenance.get("constraint") if isinstance(provenance, dict) else None
    return Result(
        cell=fields.name("cell"),
        model=fields.name("model"),
        task=fields.name("task"),
        defense=fields.name("defense"),
        label=fields.text("label") or fields.name("defense"),
        setting=fields.text("setting"),
        align=fields.name("align"),
        poison_ratio=fields.number("poison_ratio"),
        seed=fields.seed(),
        protocol_sha256=fields.name("protocol_sha256"),
        protocol=fields.get("protocol", dict),
        metrics={str(name): _measured(name, one, path) for name, one in metrics.items()},
        constraint={k: float(v) for k, v in constraint.items() if _is_number(v)}
        if isinstance(constraint, dict)
        else {},
        path=path,
        outcomes=_outcomes(value.get("outcomes"), path),
        kept_sha256=str(provenance.get("kept_sha256") or "") or None if isinstance(provenance, dict) else None,
        unit=_word(constraint, "unit"),
        majorizer=_word(constraint, "majorizer"),
    )


@dataclass(frozen=True)
class _Fields:
    """A result's object with the file it came from, for errors that name both."""

    value: dict[str, Any]
    path: Path

    def get(self, key: str, kind: type[str] | type[dict[str, Any]]) -> Any:
        found = self.value.get(key)
        if not isinstance(found, kind):
            expected = "text" if kind is str else "an object"
            raise DataError(f"{self.path}: {key} is {_shown(found)}, expected {expected}", remedy=REMEDY)
        return found

    def text(self, key: str) -> str:
        return one_line(self.get(key, str)) if self.value.get(key) is not None else ""

    def name(self, key: str) -> str:
        found = one_line(self.get(key, str))
        if not found:
            raise DataError(f"{self.path}: {key} is empty, expected a name", remedy=REMEDY)
        return found

    def number(self, key: str) -> float | None:
        found = self.value.get(key)
        if found is not None and not _is_number(found):
            raise DataError(f"{self.path}: {key} is {_shown(found)}, expected a finite number or null", remedy=REMEDY)
        return None if found is None else float(found)

    def seed(self) -> int | None:
        found = self.value.get("seed")
        if found is not None and (not isinstance(found, int) or isinstance(found, bool)):
            raise DataError(f"{self.path}: seed is {_shown(found)}, expected a whole number or null", remedy=REMEDY)
        return found


def _measured(name: object, value: Any, path: Path) -> Measured:
    parts = value if isinstance(value, dict) else {}
    wrong = [key for key in ("low", "high") if parts.get(key) is not None and not _is_number(parts[key])]
    if not _is_number(parts.get("value")) or wrong:
        raise DataError(
            f"{path}: metrics.{name} has {wrong[0] if wrong else 'value'} "
            f"{_shown(parts.get(wrong[0] if wrong else 'value'))}, expected a finite number",
            remedy="score the cell again",
        )
    low, high = (None if parts.get(key) is None else float(parts[key]) for key in ("low", "high"))
    n = parts.get("n")
    return Measured(float(parts["value"]), low, high, n if isinstance(n, int) else None)


def _word(constraint: Any, name: str) -> str | None:
    found = constraint.get(name) if isinstance(constraint, dict) else None
    return found if isinstance(found, str) else None


def _outcomes(value: Any, path: Path) -> dict[str, tuple[bool, ...]]:
    """A string of 0 and 1 per metric; nothing where the result tells none."""
    if value is None:
        return {}
    told = value.values() if isinstance(value, dict) else [None]
    if not all(isinstance(bits, str) and set(bits) <= {"0", "1"} for bits in told):
        raise DataError(f"{path}: outcomes are not strings of 0 and 1", remedy="score the cell again")
    return {str(name): tuple(bit == "1" for bit in bits) for name, bits in value.items()}


def one_line(text: str) -> str:
    """Printable text on one line: with a line break in it, a label could pass for a row of its own."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # JSON has whole numbers that no float holds
        return False


def _shown(value: object) -> str:
    """A value in an error: its kind where it could be long, since a foreign file may hold anything."""
    if not isinstance(value, int | float | None):
        return f"of type {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 24 else f"a number of {len(text)} digits"
