"""Times, tokens and memory of training steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import TrainerCallback

MIB = 2**20


def now() -> float:
    """Seconds, with everything the device was given finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def allocated_mib() -> float | None:
    """Memory in use now; before a measurement, what the ones before it did not give back. None on a CPU."""
    return torch.cuda.memory_allocated() / MIB if torch.cuda.is_available() else None


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
        """Note how long the step took."""
        at = now()
        self.seconds.append(at - self._last)
        self._last = at

    @staticmethod
    def memory_mib() -> tuple[float | None, float | None]:
        """Peak of allocated and of reserved memory since training began; None on a CPU."""
        if not torch.cuda.is_available():
            return None, None
        return torch.cuda.max_memory_allocated() / MIB, torch.cuda.max_memory_reserved() / MIB


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
