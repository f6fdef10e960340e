"""Results for tests: written as a study writes them, invented or taken from a file of reported figures."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdfast.core.hashing import sha256_json
from holdfast_lab.tables.results import Result, parse_result

PROTOCOL: dict[str, Any] = {"template": "chat", "train": {"learning_rate": 3e-4, "epochs": 1}}
SEEDS = (42, 1337, 2024)


def result_json(
    defense: str = "sft",
    *,
    model: str = "SmolLM2-135M-Instruct",
    task: str = "sst2",
    label: str | None = None,
    setting: str = "",
    align: str = "sft",
    ratio: float | None = 0.5,
    seed: int | None = 42,
    protocol: dict[str, Any] = PROTOCOL,
    constraint: dict[str, Any] | None = None,
    cell: str | None = None,
    **metrics: float | tuple[float, float, float],
) -> dict[str, Any]:
    """A result as it stands in its file; a metric is a value or (value, low, high)."""
    if defense in ("base", "aligned"):
        ratio = seed = None
    shown = {}
    for name, value in (metrics or {"HS": 0.5, "FA": 0.9}).items():
        parts = value if isinstance(value, tuple) else (value, None, None)
        shown[name.replace("__", ".")] = dict(zip(("value", "low", "high"), parts, strict=True)) | {"n": 200}
    named = [model, task, defense, label or "", setting, align, f"p{ratio}", f"s{seed}", *sorted(shown)[:1]]
    return {
        "version": 1,
        "cell": cell or ".".join(part for part in named if part).replace("/", "-"),
        "model": model,
        "model_ref": "embedded",
        "task": task,
        "defense": defense,
        "label": label or defense,
        "setting": setting,
        "align": align,
        "poison_ratio": ratio,
        "seed": seed,
        "protocol_sha256": sha256_json(protocol),
        "protocol": protocol,
        "metrics": shown,
        "seconds": {"train": 1.0},
        "provenance": {"constraint": constraint} if constraint else {},
    }


def write_results(folder: Path, values: Iterable[dict[str, Any]]) -> Path:
    """Write results as a study does; returns the study's folder."""
    inside = folder / "results"
    inside.mkdir(parents=True, exist_ok=True)
    for value in values:
        path = inside / f"{value['cell']}.json"
        assert not path.exists(), path
        path.write_text(json.dumps(value), encoding="utf-8")
    return folder


def results(values: Iterable[dict[str, Any]]) -> list[Result]:
    """Results as they are read from their files, by cell."""
    found = [parse_result(json.loads(json.dumps(value)), Path(f"{value['cell']}.json")) for value in values]
    return sorted(found, key=lambda result: result.cell)


METHODS = {
    "Base": ("base", "sft"),
    "Aligned (SFT)": ("aligned", "sft"),
    "SFT-Aligned": ("aligned", "sft"),
    "Antibody-Aligned": ("aligned", "antibody"),
    "Ours": ("holdfast", "sft"),
    "Our method": ("holdfast", "sft"),
    "Ours on SFT-Aligned": ("holdfast", "sft"),
    "Ours on Antibody-Aligned": ("holdfast", "antibody"),
    "Antibody": ("antibody", "antibody"),
    "Primal-Dual": ("primal_dual", "sft"),
}


def from_reported(path: Path, table: str) -> list[dict[str, Any]]:
    """The reported figures of one table as results.

    Three seeds (mean - std, mean, mean + std) have exactly that mean and that sample standard deviation.
    """
    found: dict[tuple[Any, ...], dict[str, tuple[float, float | None]]] = defaultdict(dict)
    with path.open(encoding="utf-8", newline="") as handle:
        for row in csv.DictReader(handle):
            if row["table"] == table:
                defense, align = METHODS.get(row["method"], (row["method"].lower(), "sft"))
                ratio = None if row["poison_ratio"] in ("", "any") else float(row["poison_ratio"])
                key = (row["model"], row["task"], defense, align, ratio, row["setting"])
                found[key][row["metric"]] = (float(row["mean"]), float(row["std"]) if row["std"] else None)
    values = []
    for (model, task, defense, align, ratio, setting), metrics in found.items():
        seeds = SEEDS if any(std is not None for _, std in metrics.values()) else SEEDS[:1]
        for place, seed in zip((0, -1, 1), seeds, strict=False):
            one = {name: mean + place * (std or 0.0) for name, (mean, std) in metrics.items()}
            where: dict[str, Any] = {"model": model, "task": task, "align": align, "ratio": ratio, "seed": seed}
            values.append(result_json(defense, setting=setting, **where, **one))
    return values
