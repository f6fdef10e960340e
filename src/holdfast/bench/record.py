"""The result of a benchmark: rows with their ratios, written after every measurement so that a stop loses nothing."""

from __future__ import annotations

import contextlib
import importlib.metadata
from pathlib import Path
from typing import Any

from holdfast.bench.settings import BASELINE, Cell, Settings
from holdfast.core.files import write_json
from holdfast.core.provenance import commit, hardware, versions

VERSION = 1
KERNELS = ("triton", "flash-attn", "flash-linear-attention", "causal-conv1d", "kernels", "liger-kernel")
"""Packages without which transformers takes a slower way, linear attention a much slower one."""


class Record:
    """What has been measured so far, and the file it is in.

    A row's x_trl_sft is its median over that of `trl_sft` in the same group (shape, checkpointing, value of the sweep),
    x_memory the same for the peak.
    """

    def __init__(self, settings: Settings, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.drift: list[dict[str, Any]] = []
        self.reference: list[dict[str, Any]] = []
        self._settings = settings.to_json()
        self._provenance = {"versions": versions(), "commit": commit(), "hardware": hardware(), "kernels": kernels()}
        self._baselines: dict[tuple[Any, ...], dict[str, Any]] = {}

    def add(self, cell: Cell, row: dict[str, Any]) -> dict[str, Any]:
        """Complete a row with its ratios, keep it and write the file."""
        if cell.path == BASELINE and "error" not in row:
            self._baselines[cell.group] = row
        first = self._baselines.get(cell.group, {})
        row |= {
            "x_trl_sft": _ratio(row.get("median_ms"), first.get("median_ms")),
            "x_memory": _ratio(row.get("peak_mib"), first.get("peak_mib")),
        }
        self.rows.append(row)
        self.write()
        return row

    def add_drift(self, cell: Cell, again: dict[str, Any]) -> dict[str, Any] | None:
        """Note how the baseline, measured again, compares with its first figure; None where either failed."""
        first = self._baselines.get(cell.group)
        if first is None or "error" in again:
            return None
        found = {
            "shape": cell.shape, "checkpointing": cell.checkpointing, "median_ms": again["median_ms"],
            "x_first": _ratio(again["median_ms"], first["median_ms"]),
        }  # fmt: skip
        self.drift.append(found)
        self.write()
        return found

    def add_reference(self, found: dict[str, Any]) -> None:
        """Keep a figure of the reference pass."""
        self.reference.append(found)
        self.write()

    def to_json(self) -> dict[str, Any]:
        """The whole result."""
        return {
            "version": VERSION, "rows": self.rows, "drift": self.drift, "reference": self.reference,
            "settings": self._settings, "provenance": self._provenance,
        }  # fmt: skip

    def write(self) -> None:
        """Write the file; a reader sees the old content or the new."""
        write_json(self.path, self.to_json())


def kernels() -> dict[str, str | None]:
    """Versions of the kernel packages, None where one is not installed."""
    found: dict[str, str | None] = dict.fromkeys(KERNELS)
    for name in KERNELS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
