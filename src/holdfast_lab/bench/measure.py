"""One measurement: train on a path; times, tokens and memory of its steps."""

import gc
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import TrainerCallback

from holdfast.core.errors import HoldfastError
from holdfast.training import fingerprint as training
from holdfast_lab.bench.paths import Material, build
from holdfast_lab.bench.settings import BASELINE, Cell

MIB = 2**20


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

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock. From here memory counts, so that recording of graphs does."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the reference pass left in the allocator is not the step's
            torch.cuda.reset_peak_memory_stats()
        self._last = now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        at = now()
        self.seconds.append(at - self._last)
        self._last = at


class CountedCollator:
    """A collator that notes how many tokens its batches hold, padding left out; one batch is one step."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.tokens: list[int] = []

    def __call__(self, examples: Sequence[dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
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
        if cell.path != BASELINE:
            trainer.step_listeners.append(lambda row: events.update([row["event"]] if "event" in row else []))
        trainer.train()
        peak, reserved = _mib("max_memory_allocated"), _mib("max_memory_reserved")
        tokens = counted.tokens[cell.warm_up : cell.warm_up + cell.steps]
        tokens += _safety_tokens(trainer, cell)
    return {**step_figures(clock.seconds[cell.warm_up :], sum(tokens)), "peak_mib": peak, "reserved_mib": reserved,
            "before_mib": before, "events": dict(events), "log": said}  # fmt: skip


def step_figures(seconds: list[float], tokens: int) -> dict[str, Any]:
    """Median and 90 % quantile of the steps in milliseconds, and tokens per second over all of them."""
    return {
        "median_ms": 1e3 * float(np.median(seconds)),
        "p90_ms": 1e3 * float(np.quantile(seconds, 0.9)),
        "tokens_per_s": tokens / sum(seconds),
        "steps_ms": [round(1e3 * s, 3) for s in seconds],
    }


def _safety_tokens(trainer: Any, cell: Cell) -> list[int]:
    found = []
    for name, safety in getattr(trainer, "safety", {}).items():
        sizes = [len(example.input_ids) for example in safety.constraint_set]
        stream = trainer.run.data._streams[name]
        for step in range(cell.warm_up, cell.warm_up + cell.steps):
            found.append(sum(sizes[i] for i in stream.indices(step)))
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
    before = logger.handlers, logger.level, logger.propagate
    logger.handlers, logger.propagate = [Keep()], False
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.handlers, logger.propagate = before[0], before[2]
        logger.setLevel(before[1])


def _in_words(error: Exception) -> str:
    if isinstance(error, HoldfastError):
        return error.what
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out of memory"
    first = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {first}"[:300]
