"""A benchmark from beginning to end: all paths of all shapes in one process, written after every measurement.

Reference losses are measured against bare forward passes over the same padded batches, which compute the logits of
every token, as transformers does:

    share = tokens per second of `Forward.losses` / tokens per second of `model(input_ids, attention_mask)`
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import logging
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
from peft import get_peft_model
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import HoldfastError
from holdfast.core.files import write_json
from holdfast.core.provenance import commit, hardware, versions
from holdfast.data.encode import Encoded, encode_all
from holdfast.data.sources import examples_from_rows
from holdfast.scoring.completion import deterministic
from holdfast.scoring.forward import Forward
from holdfast.training import fingerprint as training
from holdfast.training.support import cudnn_attention
from holdfast_lab.bench.paths import Material, adapter, build, found_in_trl, rows, safety_pairs, word_tokenizer
from holdfast_lab.bench.settings import BASELINE, BEST, TRL, Cell, Settings, random_model

if TYPE_CHECKING:
    from holdfast.training.trainer import SafeTrainer

ROWS, BATCH, REPETITIONS = 256, 8, 5  # a batch as `safety_eval_batch_size` has it
MIB = 2**20
VERSION = 1
# Packages without which transformers takes a slower way, linear attention a much slower one.
KERNELS = ("triton", "flash-attn", "flash-attn-3", "flash-linear-attention", "causal-conv1d", "kernels", "liger-kernel")
Listener = Callable[[str, dict[str, Any]], None]  # receives ("row" | "drift" | "reference", what was just measured)


def reference_throughput(shape: str, settings: Settings, *, n: int = ROWS) -> dict[str, Any]:
    """Median milliseconds of both passes over n safe rows, taking turns, and the share of the bare throughput."""
    tokenizer = word_tokenizer()
    made = rows(safety_pairs(n, seed=settings.seed), seed=settings.seed, name="reference")
    examples = examples_from_rows(made, name="reference")
    encoded = encode_all(examples, tokenizer, max_length=None, role="safety").examples
    model = get_peft_model(random_model(shape), adapter(settings)).eval()
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
    with deterministic(forward.model), forward.precision():
        for positions in forward.batches(encoded):
            batch = forward.batch([encoded[i] for i in positions])
            forward.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])


class Record:
    """What has been measured so far, and the file it is in: written after every measurement, the old or the new."""

    def __init__(self, settings: Settings, path: Path, listener: Listener = lambda *_: None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.drift: list[dict[str, Any]] = []
        self.reference: list[dict[str, Any]] = []
        self._path, self._listener, self._baselines = path, listener, dict[tuple[Any, ...], dict[str, Any]]()
        kernels: dict[str, str | None] = dict.fromkeys(KERNELS)
        for name in KERNELS:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                kernels[name] = importlib.metadata.version(name)
        machine = {"versions": versions(), "commit": commit(), "hardware": hardware(), "kernels": kernels}
        self._about = {"settings": asdict(settings), "provenance": machine}

    def add(self, cell: Cell, row: dict[str, Any]) -> None:
        """Keep a row with its ratios to TRL's of the same group (shape, checkpointing, value of the sweep)."""
        if cell.path in TRL and "error" not in row:
            self._baselines[cell.path, cell.group] = row
        ratios = (("x_trl_sft", BASELINE, "median_ms"), ("x_memory", BASELINE, "peak_mib"))
        for name, path, figure in (*ratios, ("x_trl_best", BEST, "median_ms")):
            row[name] = _ratio(row.get(figure), self._baselines.get((path, cell.group), {}).get(figure))
        self._keep("row", self.rows, row)

    def add_drift(self, cell: Cell, again: dict[str, Any]) -> None:
        """Note how the baseline, measured again, compares with its first figure, unless either failed."""
        first = self._baselines.get((BASELINE, cell.group))
        if first is not None and "error" not in again:
            kept = {name: again[name] for name in ("shape", "checkpointing", "median_ms")}
            kept["x_first"] = _ratio(again["median_ms"], first["median_ms"])
            self._keep("drift", self.drift, kept)

    def add_reference(self, shape: str, settings: Settings) -> None:
        try:
            measured = reference_throughput(shape, settings)
        except (RuntimeError, MemoryError) as error:  # out of memory is one of the former
            measured = {"shape": shape, "error": str(error).split("\n")[0][:300]}
        release()
        self._keep("reference", self.reference, measured)

    def _keep(self, kind: str, part: list[dict[str, Any]], entry: dict[str, Any]) -> None:
        part.append(entry)
        write_json(self._path, self.to_json())
        self._listener(kind, entry)

    def to_json(self) -> dict[str, object]:
        parts = {"rows": self.rows, "drift": self.drift, "reference": self.reference}
        return {"version": VERSION, **parts, **self._about}


def run(settings: Settings, output: Path, listener: Listener) -> Record:
    """Measure everything, and keep it in `output` (JSON).

    cuDNN's attention is switched off for all paths unless the settings leave it on: it builds a plan for every new
    shape of a batch, and 25 batches of text are 25 shapes.
    """
    record = Record(settings, output, listener)
    with cudnn_attention(settings.cudnn), tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        for shape in settings.shapes:
            cells = settings.cells(shape)
            measure(replace(cells[0], path=BASELINE, steps=3, warm_up=0), cache)  # thrown away: the first loads kernels
            for cell in cells:
                record.add(cell, measure(cell, cache))
            for cell in cells if settings.drift and not settings.sweep else ():
                if cell.path == BASELINE:
                    record.add_drift(cell, measure(cell, cache))
            if settings.reference and not settings.sweep:
                record.add_reference(shape, settings)
    return record


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def now() -> float:
    """Seconds, with everything the device was given finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _mib(what: str) -> float | None:
    return getattr(torch.cuda, what)() / MIB if torch.cuda.is_available() else None


class StepClock(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """Seconds of every step, from the end of the one before it, and the peak of memory since training began."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Start the clock. From here memory counts, so that recording of graphs does."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the reference pass left in the allocator is not the step's
            torch.cuda.reset_peak_memory_stats()
        self._last = now()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        at = now()
        self.seconds.append(at - self._last)
        self._last = at


class CountedCollator:
    """A collator that notes how many tokens its batches hold, padding left out; one batch is one step."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.tokens: list[int] = []

    def __call__(self, examples: Sequence[dict[str, Any]], *args: object, **kwargs: object) -> Any:
        self.tokens.append(sum(len(example["input_ids"]) for example in examples))
        return self.inner(examples, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


def measure(cell: Cell, cache: Path) -> dict[str, Any]:
    """The row of a cell: figures of its steps, or `error` where it could not be trained.

    The constrained paths of one shape share their reference losses in `cache`.
    """
    row: dict[str, Any] = {"shape": cell.shape, "path": cell.path, "checkpointing": cell.checkpointing}
    if cell.sweep:
        row |= {"sweep": cell.sweep, "value": cell.value}
    try:
        row |= _trained(cell, cache)
    except Exception as error:  # noqa: BLE001  (whatever one path meets, the others are measured)
        row["error"] = _in_words(error)
    release()  # after the exception has gone, whose frames held the model
    return row


def release() -> None:
    """Give the memory of what was measured back, so that the next path starts from an empty device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _trained(cell: Cell, cache: Path) -> dict[str, Any]:
    # Memory in use before is what the measurements before this one did not give back.
    clock, events, before = StepClock(), Counter[str](), _mib("memory_allocated")
    name = f"random/{cell.shape}"
    # Random weights are named by their shape: hashing 16 GB for every path would take longer than measuring it.
    unhashed = patch.multiple(training, frozen_fingerprint=lambda _: name, model_fingerprint=lambda _: name)
    with tempfile.TemporaryDirectory() as folder, unhashed, _captured() as said:
        trainer = build(cell, Material.of(cell), Path(folder), cache, [clock])
        counted = trainer.data_collator = CountedCollator(trainer.data_collator)
        if cell.path not in TRL:
            trainer.step_listeners.append(lambda row: events.update([row["event"]] if "event" in row else []))
        # Liger puts its kernels into the module of the architecture too, where the next paths would run them.
        with patch.dict(vars(sys.modules[type(trainer.model.get_base_model()).__module__])):
            trainer.train()
        peak, reserved = _mib("max_memory_allocated"), _mib("max_memory_reserved")
        tokens = counted.tokens[cell.warm_up : cell.warm_up + cell.steps]
        tokens += _safety_tokens(trainer, cell)
        trl = {"trl": found_in_trl(trainer)} if cell.path in TRL else {}
    return {**step_figures(clock.seconds[cell.warm_up :], sum(tokens)), "peak_mib": peak, "reserved_mib": reserved,
            "before_mib": before, "events": dict(events), "log": said, **trl}  # fmt: skip


def step_figures(seconds: list[float], tokens: int) -> dict[str, Any]:
    """Median and 90 % quantile of the steps in milliseconds, and tokens per second over all of them."""
    return {
        "median_ms": 1e3 * float(np.median(seconds)), "p90_ms": 1e3 * float(np.quantile(seconds, 0.9)),
        "tokens_per_s": tokens / sum(seconds), "steps_ms": [round(1e3 * s, 3) for s in seconds],
    }  # fmt: skip


def _safety_tokens(trainer: SafeTrainer, cell: Cell) -> list[int]:
    found: list[int] = []
    for name, safety in getattr(trainer, "safety", {}).items():
        sizes = [len(example.input_ids) for example in safety.steering_rows]
        stream, steps = trainer.run.data._streams[name], range(cell.warm_up, cell.warm_up + cell.steps)
        found += [sum(sizes[i] for i in stream.indices(step)) for step in steps]
    return found


@contextmanager
def _captured() -> Iterator[list[str]]:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if not text.startswith("safety: ") and text not in lines:
                lines.append(text)

    logger = logging.getLogger("holdfast")
    level = logger.level
    with patch.multiple(logger, handlers=[Keep()], propagate=False):
        logger.setLevel(logging.INFO)
        try:
            yield lines
        finally:
            logger.setLevel(level)


def _in_words(error: Exception) -> str:
    if isinstance(error, HoldfastError):
        return error.what
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out of memory"
    first = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {first}"[:300]
