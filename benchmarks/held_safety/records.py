"""Reading the records of cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.held_safety.bounds import Difference, columns, difference
from benchmarks.held_safety.cells import SHIPPED

from holdfast.core.files import read_json

Record = Mapping[str, Any]


def read_records(folder: Path) -> list[Record]:
    """Every cell's record."""
    found = [read_json(path) for path in sorted(folder.glob("*.json"))]
    return [record for record in found if record.get("kind") == "cell"]


def evaluated(records: Iterable[Record], **wanted: Any) -> list[Record]:
    """Those with an evaluation and these values, by seed."""
    chosen = [r for r in records if r["evaluation"] and all(r[key] == value for key, value in wanted.items())]
    return sorted(chosen, key=lambda record: record["seed"] or 0)


def among(records: Iterable[Record], folder: Path | None) -> list[Record]:
    """With only those runs of `auto` whose cells the folder has too; all of them without a folder."""
    if folder is None:
        return list(records)
    names = {record["name"] for record in read_records(folder)}
    return [record for record in records if record["method"] != "auto" or record["name"] in names]


def shipped(records: Iterable[Record], model: str, part: str) -> Record:
    """The model itself."""
    found = evaluated(records, method=SHIPPED, model=model, part=part)
    if not found:
        raise SystemExit(f"there is no record of {model} as shipped ({part} prompts)")
    return found[0]


def same_prompts(records: Sequence[Record], names: Iterable[str]) -> None:
    """Refuse to compare cells that were asked other prompts."""
    for name in names:
        hashes = {record["evaluation"]["prompts_sha256"].get(name) for record in records}
        if len(hashes) > 1:
            raise SystemExit(f"cells were asked different {name} prompts: {', '.join(r['name'] for r in records)}")


def from_shipped(cells: Sequence[Record], before: Record, bits: str, hit: str) -> Difference:
    """Share of `hit` in the cells minus the shipped model's, prompt by prompt."""
    same_prompts([*cells, before], ["borderline" if bits == "borderline" else "harm"])
    after = columns([cell["evaluation"]["bits"][bits] for cell in cells], hit)
    return difference(after - columns([before["evaluation"]["bits"][bits]], hit))


def from_other(cells: Sequence[Record], others: Sequence[Record], task: str) -> Difference | None:
    """Accuracy minus that of other cells with the same seeds, row by row; None where a seed or the replies lack."""
    pairs = {cell["seed"]: cell for cell in cells}, {other["seed"]: other for other in others}
    if not cells or set(pairs[0]) - set(pairs[1]):
        return None
    chosen = [[side[seed] for seed in sorted(pairs[0])] for side in pairs]
    if any(task not in record["evaluation"]["bits"] for side in chosen for record in side):
        return None
    same_prompts([*chosen[0], *chosen[1]], [task])
    first, second = (columns([record["evaluation"]["bits"][task] for record in side]) for side in chosen)
    return difference(first - second)


def mean_of(cells: Sequence[Record], *keys: str) -> float | None:
    """The mean of one figure of the evaluation; None where a cell has none."""
    found = []
    for cell in cells:
        value: Any = cell["evaluation"]
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        found.append(value)
    return None if not found or None in found else sum(found) / len(found)
