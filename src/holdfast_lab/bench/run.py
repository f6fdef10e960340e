"""A benchmark from beginning to end: all paths of all shapes in one process, written after every measurement.

Reference losses are measured against bare forward passes over the same padded batches, which compute the logits of
every token, as transformers does:

    share = tokens per second of `Forward.losses` / tokens per second of `model(input_ids, attention_mask)`
"""

import contextlib
import importlib.metadata
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model

from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.files import write_json
from holdfast.core.provenance import commit, hardware, versions
from holdfast.data.encode import Encoded, encode_all
from holdfast.data.sources import examples_from_rows
from holdfast.scoring.completion import deterministic
from holdfast.scoring.forward import Forward
from holdfast_lab.bench.measure import measure, now, release
from holdfast_lab.bench.paths import adapter, rows, safety_pairs, word_tokenizer
from holdfast_lab.bench.settings import BASELINE, Cell, Settings
from holdfast_lab.bench.shapes import random_model

ROWS, BATCH, REPETITIONS = 256, 8, 5  # a batch as `safety_eval_batch_size` has it
VERSION = 1
# Packages without which transformers takes a slower way, linear attention a much slower one.
KERNELS = ("triton", "flash-attn", "flash-linear-attention", "causal-conv1d", "kernels", "liger-kernel")
Listener = Callable[[str, dict[str, Any]], None]  # receives ("row" | "drift" | "reference", what was just measured)


def reference_throughput(shape: str, settings: Settings, *, n: int = ROWS) -> dict[str, Any]:
    """Median milliseconds of both passes over n safe rows, taking turns, and the share of the bare throughput."""
    tokenizer = word_tokenizer()
    made = rows(safety_pairs(n, seed=settings.seed), seed=settings.seed, name="reference")
    examples = examples_from_rows(made, name="reference")
    encoded = encode_all(examples, tokenizer, max_length=None, role="safety").examples
    model = get_peft_model(random_model(shape), adapter(settings.rank)).eval()
    # The autocast of training.
    precision = partial(torch.autocast, "cuda", torch.bfloat16) if torch.cuda.is_available() else nullcontext
    padding = tokenizer.pad_token_id
    forward = Forward(model, pad_token_id=padding, batch_size=BATCH, device=model.device, precision=precision)
    first_k = ChanceConstraint().first_k
    passes: dict[str, Callable[[], Any]] = {
        "bare": lambda: _bare(forward, encoded),
        "losses": lambda: forward.losses(encoded, first_k),
    }
    times: dict[str, list[float]] = {name: [] for name in passes}
    for repetition in range(REPETITIONS + 1):  # the first loads kernels
        for name, run in passes.items():
            start = now()
            run()
            if repetition:
                times[name].append(now() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    tokens = sum(len(item.input_ids) for item in encoded)
    return {
        "shape": shape, "rows": len(encoded), "tokens": tokens, "batch": BATCH,
        "bare_ms": 1e3 * medians["bare"], "losses_ms": 1e3 * medians["losses"],
        "tokens_per_s": tokens / medians["losses"], "share": medians["bare"] / medians["losses"],
    }  # fmt: skip


@torch.no_grad()
def _bare(forward: Forward, encoded: Sequence[Encoded]) -> None:
    ordered = sorted(encoded, key=lambda item: len(item.input_ids))
    with deterministic(forward.model), forward.precision():
        for start in range(0, len(ordered), forward.batch_size):
            batch = forward.batch(ordered[start : start + forward.batch_size])
            forward.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])


class Record:
    """What has been measured so far, and the file it is in: written after every measurement, the old or the new."""

    def __init__(self, settings: Settings, path: Path) -> None:
        self.rows: list[dict[str, Any]] = []
        self.drift: list[dict[str, Any]] = []
        self.reference: list[dict[str, Any]] = []
        self._path, self._baselines = path, dict[tuple[Any, ...], dict[str, Any]]()
        kernels: dict[str, str | None] = dict.fromkeys(KERNELS)
        for name in KERNELS:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                kernels[name] = importlib.metadata.version(name)
        machine = {"versions": versions(), "commit": commit(), "hardware": hardware(), "kernels": kernels}
        self._about = {"settings": asdict(settings), "provenance": machine}

    def add(self, cell: Cell, row: dict[str, Any]) -> dict[str, Any]:
        """Keep a row with its ratios to `trl_sft` of the same group (shape, checkpointing, value of the sweep)."""
        if cell.path == BASELINE and "error" not in row:
            self._baselines[cell.group] = row
        first = self._baselines.get(cell.group, {})
        row |= {
            "x_trl_sft": _ratio(row.get("median_ms"), first.get("median_ms")),
            "x_memory": _ratio(row.get("peak_mib"), first.get("peak_mib")),
        }
        return self._keep(self.rows, row)

    def add_drift(self, cell: Cell, again: dict[str, Any]) -> dict[str, Any] | None:
        """Note how the baseline, measured again, compares with its first figure; None where either failed."""
        first = self._baselines.get(cell.group)
        if first is None or "error" in again:
            return None
        x_first = _ratio(again["median_ms"], first["median_ms"])
        where = {"shape": cell.shape, "checkpointing": cell.checkpointing}
        return self._keep(self.drift, {**where, "median_ms": again["median_ms"], "x_first": x_first})

    def add_reference(self, shape: str, settings: Settings) -> dict[str, Any]:
        try:
            measured = reference_throughput(shape, settings)
        except (RuntimeError, MemoryError) as error:  # out of memory is one of the former
            measured = {"shape": shape, "error": str(error).split("\n")[0][:300]}
        release()
        return self._keep(self.reference, measured)

    def _keep(self, part: list[dict[str, Any]], entry: dict[str, Any]) -> dict[str, Any]:
        part.append(entry)
        write_json(self._path, self.to_json())
        return entry

    def to_json(self) -> dict[str, Any]:
        parts = {"rows": self.rows, "drift": self.drift, "reference": self.reference}
        return {"version": VERSION, **parts, **self._about}


def run(settings: Settings, output: Path, listener: Listener) -> Record:
    """Measure everything, and keep it in `output` (JSON).

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
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
    return record


def _measure_shape(shape: str, settings: Settings, cache: Path, record: Record, listener: Listener) -> None:
    cells = settings.cells(shape)
    measure(replace(cells[0], path=BASELINE, steps=3, warm_up=0), cache)  # thrown away: the first loads kernels
    for cell in cells:
        listener("row", record.add(cell, measure(cell, cache)))
    for cell in cells if settings.drift and not settings.sweep else ():
        if cell.path == BASELINE and (again := record.add_drift(cell, measure(cell, cache))) is not None:
            listener("drift", again)
    if settings.reference and not settings.sweep:
        listener("reference", record.add_reference(shape, settings))


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
