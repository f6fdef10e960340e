"""A benchmark from beginning to end: all paths of all shapes in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from holdfast.bench.measure import measure, release
from holdfast.bench.picture import draw
from holdfast.bench.record import Record
from holdfast.bench.reference import reference_throughput
from holdfast.bench.settings import BASELINE, Cell, Settings
from holdfast.core.files import write_bytes

Listener = Callable[[str, dict[str, Any]], None]
"""Receives ("row" | "drift" | "reference", what was just measured)."""


def run(settings: Settings, output: Path, listener: Listener) -> Record:
    """Measure everything, and keep it in `output` (JSON) and beside it as a picture (.png).

    cuDNN's attention is switched off for all paths unless the settings leave it on: it builds a plan for every new
    shape of a batch, and 25 batches of text are 25 shapes.
    """
    record = Record(settings, output)
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(settings.cudnn)
    try:
        with tempfile.TemporaryDirectory() as cache:
            for shape in settings.shapes:
                _measure_shape(shape, settings, Path(cache), record, listener)
                picture = draw(record.to_json())
                if picture is not None:
                    write_bytes(output.with_suffix(".png"), picture)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
    return record


def _measure_shape(shape: str, settings: Settings, cache: Path, record: Record, listener: Listener) -> None:
    cells = settings.cells(shape)
    measure(_kernels(cells[0]), cache)
    for cell in cells:
        listener("row", record.add(cell, measure(cell, cache)))
    if settings.drift and not settings.sweep:
        for cell in (cell for cell in cells if cell.path == BASELINE):
            again = record.add_drift(cell, measure(cell, cache))
            if again is not None:
                listener("drift", again)
    if settings.reference and not settings.sweep:
        listener("reference", _reference(shape, settings, record))


def _kernels(cell: Cell) -> Cell:
    """A short training whose figures are thrown away: the first one loads kernels."""
    return replace(cell, path=BASELINE, steps=3, warm_up=0)


def _reference(shape: str, settings: Settings, record: Record) -> dict[str, Any]:
    try:
        found = reference_throughput(shape, settings)
    except (RuntimeError, MemoryError) as error:  # out of memory is one of the former
        found = {"shape": shape, "error": str(error).split("\n")[0][:300]}
    release()
    record.add_reference(found)
    return found
