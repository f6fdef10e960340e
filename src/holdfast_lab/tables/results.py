"""The results of a study: one JSON file per cell, read strictly; one protocol in one table."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.errors import DataError
from holdfast.core.files import read_json
from holdfast.core.hashing import sha256_json

VERSION = 1
REFERENCES = ("base", "aligned")
REMEDY = "name the output_dir of `holdfast study`, or a folder that holds its result files and nothing else"
SHOWN = 3  # fields named in which two protocols differ


@dataclass(frozen=True)
class Measured:
    """One metric of one cell: its value, a confidence interval where there is one, and the sample size."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None


@dataclass(frozen=True)
class Result:
    """One cell of a study."""

    cell: str  # its id
    model: str  # the name shown
    task: str
    defense: str  # a name in DEFENSES, or `base` / `aligned` for the models before fine-tuning
    label: str  # what the row is called; equal to `defense` where the study gave no name
    setting: str  # what differs from the defense's default, e.g. `tau=0.05`; empty for the default.
    align: str  # the alignment recipe, `sft` or a defense of the alignment stage
    poison_ratio: float | None  # poison_ratio, seed: None for the references
    seed: int | None
    protocol_sha256: str
    protocol: Mapping[str, Any]
    metrics: Mapping[str, Measured]
    constraint: Mapping[str, float]  # tau, alpha and beta of the run, where the result has them
    path: Path
    stored: Mapping[str, Any] = field(default_factory=dict)  # the whole file

    @property
    def is_reference(self) -> bool:
        """Whether this is a model before fine-tuning: no seed, no poison, and never marked best."""
        return self.defense in REFERENCES


def read_results(*folders: Path) -> list[Result]:
    """Every result of studies' output_dirs (their `results/`) or of folders of results; refused if a cell is twice."""
    results = [result for folder in folders for result in _results_in(folder)]
    require_distinct(results)
    return results


def _results_in(folder: Path) -> list[Result]:
    inside = folder / "results" if (folder / "results").is_dir() else folder
    if not inside.is_dir():
        raise DataError(f"{folder} is not a folder, expected the results of a study", remedy=REMEDY)
    if (folder / "config.yaml").is_file() and inside == folder:
        raise DataError(f"{folder} is the folder of a run, expected the output_dir of a study", remedy=REMEDY)
    results = [parse_result(read_json(path), path) for path in sorted(inside.glob("*.json"))]
    if not results:
        raise DataError(f"{inside} holds no result (*.json)", remedy=REMEDY)
    return results


def require_distinct(results: Sequence[Result]) -> None:
    """Raises `DataError` when one cell comes twice, since its seed would count twice."""
    seen: dict[str, Path] = {}
    for result in results:
        if result.cell in seen:
            what = f"{seen[result.cell]} and {result.path} are both cell {result.cell!r}, expected each cell once"
            raise DataError(what, remedy="remove the copy")
        seen[result.cell] = result.path


def failed_cells(folder: Path) -> list[str]:
    """Ids of the cells of a study's output_dir that failed and have no result."""
    failed = (path.stem for path in sorted((folder / "errors").glob("*.json")))
    return [cell for cell in failed if not (folder / "results" / f"{cell}.json").exists()]


def require_one_protocol(results: Sequence[Result], table: str) -> None:
    """Raises `DataError` naming two cells and the first fields in which their protocols differ."""
    if not results:
        return
    first = results[0]
    digest = sha256_json(first.protocol)
    for other in results[1:]:
        if other.protocol_sha256 == first.protocol_sha256 and sha256_json(other.protocol) == digest:
            continue
        fields = list(differences(first.protocol, other.protocol))
        more = f" and {len(fields) - SHOWN} more" if len(fields) > SHOWN else ""
        where = ", ".join(fields[:SHOWN]) + more if fields else "protocol_sha256 alone"
        raise DataError(
            f"table {table}: cells {first.cell} and {other.cell} follow different protocols ({where}), "
            "expected one protocol in a table",
            remedy="make one table per protocol from a folder of its own, or run the other cells again",
        )


def differences(before: object, after: object, path: str = "") -> Iterator[str]:
    """Fields in which two protocols differ, as `path: value / value`, in sorted order."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after}, key=str):
            inner = f"{path}.{key}" if path else str(key)
            if key in before and key in after:
                yield from differences(before[key], after[key], inner)
            else:
                sides = (_short(side[key]) if key in side else "absent" for side in (before, after))
                yield f"{inner}: {' / '.join(sides)}"
    elif before != after:
        yield f"{path}: {_short(before)} / {_short(after)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def parse_result(value: object, path: Path) -> Result:
    """One result from its JSON; unknown fields are left alone, missing or mistyped ones are refused by name."""
    if not isinstance(value, dict) or "version" not in value:
        raise DataError(f"{path} is not a result of a study: no field 'version'", remedy=REMEDY)
    if value["version"] != VERSION:
        what = f"{path}: version is {value['version']!r}, expected {VERSION}"
        raise DataError(what, remedy="use the holdfast that wrote it, or run the study again")

    def get(key: str, expected: str) -> Any:
        if not EXPECTED[expected](value.get(key)):
            raise DataError(f"{path}: {key} is {_shown(value.get(key))}, expected {expected}", remedy=REMEDY)
        return value.get(key)

    def text(key: str, *, optional: bool = False) -> str:
        if optional and value.get(key) is None:
            return ""
        found = one_line(get(key, "text"))
        if not (found or optional):
            raise DataError(f"{path}: {key} is empty, expected a name", remedy=REMEDY)
        return found

    ratio = get("poison_ratio", "a finite number or null")
    provenance = value["provenance"] if isinstance(value.get("provenance"), dict) else {}
    constraint = provenance["constraint"] if isinstance(provenance.get("constraint"), dict) else {}
    return Result(
        **{key: text(key) for key in ("cell", "model", "task", "defense", "align", "protocol_sha256")},
        label=text("label", optional=True) or text("defense"),
        setting=text("setting", optional=True),
        poison_ratio=None if ratio is None else float(ratio),
        seed=get("seed", "a whole number or null"),
        protocol=get("protocol", "an object"),
        metrics={key: _measured(key, entry, path) for key, entry in get("metrics", "an object").items()},
        constraint={key: float(number) for key, number in constraint.items() if _is_number(number)},
        path=path,
        stored=value,
    )


def _measured(name: str, value: object, path: Path) -> Measured:
    parts = value if isinstance(value, dict) else {}
    for key in ("low", "high", "value"):
        if not _is_number(parts.get(key)) and (key == "value" or parts.get(key) is not None):
            what = f"{path}: metrics.{name} has {key} {_shown(parts.get(key))}, expected a finite number"
            raise DataError(what, remedy="score the cell again")
    low, high = (None if parts.get(key) is None else float(parts[key]) for key in ("low", "high"))
    return Measured(float(parts["value"]), low, high, parts["n"] if isinstance(parts.get("n"), int) else None)


def one_line(text: str) -> str:
    """Printable text on one line: with a line break in it, a label could pass for a row of its own."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # JSON has whole numbers that no float holds
        return False


EXPECTED: dict[str, Callable[[Any], bool]] = {
    "text": lambda x: isinstance(x, str),
    "an object": lambda x: isinstance(x, dict),
    "a finite number or null": lambda x: x is None or _is_number(x),
    "a whole number or null": lambda x: x is None or (isinstance(x, int) and not isinstance(x, bool)),
}


def _shown(value: object) -> str:
    """A value in an error: its kind where it could be long, since a foreign file may hold anything."""
    if not isinstance(value, int | float | None):
        return f"of type {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 24 else f"a number of {len(text)} digits"
