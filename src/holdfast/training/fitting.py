"""Out of memory in training: the same step in smaller passes, from then on.

A micro-batch of the task is passed over in 2, 4, ... parts whose losses add up to its own. With the step's number of
scored tokens N, TRL's loss of rows B is `sum over B of NLL / N`, which is a sum already; where the model divides by the
tokens of each pass instead, a part with n of its micro-batch's m tokens counts `n / m` (rows, with `loss_weights:
rows`). Batches, schedule and safety draws stay as they are, so the step is the same up to the rounding of sums (with
dropout, other masks are drawn).

What failed may have left a part of its gradient behind, so the gradient of the step so far is computed again: the
micro-batches before it are kept until the step ends.

Side rows (safety, harmful) and evaluation take half as many rows a pass. Several processes must not part ways: there
the run ends with the remedy.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from copy import copy
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from holdfast.core.errors import ResourceError
from holdfast.core.ranks import world
from holdfast.models.library_errors import free_memory, out_of_memory
from holdfast.training.hooks import Defense, Inputs, Items
from holdfast.training.row_weights import count_items

if TYPE_CHECKING:
    from holdfast.training.trainer import SafeTrainer

logger = logging.getLogger(__name__)

T = TypeVar("T")


def loss_is_scaled(trainer: SafeTrainer, items: Items) -> bool:
    """Whether a micro-batch's loss is its part of the step's already, so that the Trainer does not divide it."""
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if scaled is None:
        scaled = (trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None
    return bool(scaled)


class Fitting:
    """How large the passes of a run are, after what memory has allowed so far."""

    def __init__(self, trainer: SafeTrainer) -> None:
        self.parts = 1  # into how many a micro-batch of the task is divided
        self.share = 1.0  # what the loss of the part in progress is multiplied by; 1 where losses add up
        self.side_rows: int | None = None  # the most rows of a side pass, where something limits them
        self.eval_rows: int | None = None  # and of an evaluation pass
        self._trainer = trainer
        self._noted: list[tuple[Inputs, Items]] = []
        self._tokens = 0

    def begin(self, inputs: Inputs, items: Items, micro: int) -> None:
        """Note the micro-batch that comes next, the first of a step being number 0."""
        if micro == 0:
            self._noted, self._tokens = [], int(getattr(self._trainer, "_total_train_tokens", 0))
        self._noted.append((inputs, items))

    def step(self) -> Tensor:
        """Accumulate the gradient of the micro-batch noted last, in as many parts as fit."""
        todo = self._noted[-1:]
        while True:
            failure = ""
            try:
                losses = [self._in_parts(inputs, items) for inputs, items in todo]
            except RuntimeError as error:
                if not out_of_memory(error) or not self._divisible(todo[-1][0]):
                    raise
                failure = str(error)
            if not failure:
                return losses[-1]
            # Here, where the exception no longer holds the pass's tensors.
            self._halve_task(todo[-1][0], failure)
            for p in self._trainer.model.parameters():
                p.grad = None
            self._trainer._total_train_tokens = self._tokens
            release()
            todo = self._noted

    def _in_parts(self, inputs: Inputs, items: Items) -> Tensor:
        passing = self._trainer.plain_step
        if self.parts == 1:
            whole: Tensor = passing(copy(inputs), items)  # a copy: what fails may have changed it
            return whole
        losses = []
        for part, share in split(inputs, self.parts, by_rows=self._trainer.by_rows):
            # Where losses are divided by the tokens of the whole step, they add up.
            self.share = 1.0 if items is not None and loss_is_scaled(self._trainer, items) else share
            try:
                losses.append(passing(part, items))
            finally:
                self.share = 1.0
        return torch.stack(losses).sum()

    def _divisible(self, inputs: Inputs) -> bool:
        """Whether micro-batches can be divided: one process, and a loss that is a sum over rows with labels.

        Not so a router's, and those of pairs and groups of replies. Nor under DeepSpeed, which keeps the gradient of
        what failed in buffers of its own.
        """
        trainer, defense = self._trainer, self._trainer.defense
        summed = defense.linear and type(defense).extra_loss is Defense.extra_loss and trainer.run.parts is None
        return world() == 1 and summed and "labels" in inputs and not getattr(trainer, "aux_loss_enabled", False)

    def _halve_task(self, inputs: Inputs, failure: str) -> None:
        rows, step = len(inputs["input_ids"]), int(self._trainer.state.global_step) + 1
        whole = all(len(v) == rows for v in inputs.values() if isinstance(v, Tensor) and v.dim())
        if self.parts >= rows or not whole:
            raise ResourceError(
                f"out of memory in step {step} with {'a single row' if whole else 'flattened rows'} a "
                f"pass: {failure.splitlines()[0][:200]}",
                remedy="set gradient_checkpointing=True, lower max_length (both under `train:` in a run file), or use "
                "a larger device",
            )
        self.parts *= 2
        logger.warning(
            "out of memory: from step %d on, micro-batches are passed over in %d parts; the batch stays %d rows",
            step, self.parts, self._trainer.run.data.task_batch,
        )  # fmt: skip

    def side(self, rows: int, passing: Callable[[int], T]) -> T:
        """A pass over side rows, with at most so many rows at a time that it fits; to be repeatable as a whole."""
        return self._fewer("side_rows", rows, passing)

    def evaluation(self, rows: int, passing: Callable[[int], T]) -> T:
        """The same for a pass without a gradient."""
        return self._fewer("eval_rows", rows, passing)

    def _fewer(self, name: str, rows: int, passing: Callable[[int], T]) -> T:
        while True:
            now = min(rows, getattr(self, name) or rows)
            try:
                return passing(now)
            except RuntimeError as error:
                if not out_of_memory(error) or world() > 1 or now == 1:
                    raise
            setattr(self, name, now // 2)
            logger.warning("out of memory: %d rows at a time instead of %d (%s)", now // 2, now, name)
            release()

    def figures(self) -> dict[str, int]:
        """What was made smaller; empty where everything fitted."""
        parts = None if self.parts == 1 else self.parts
        every = {"parts": parts, "side_rows": self.side_rows, "eval_rows": self.eval_rows}
        return {name: value for name, value in every.items() if value is not None}

    def load_figures(self, figures: dict[str, int]) -> None:
        """Restore what `figures` returned: a resumed run passes over rows as the one before did."""
        self.parts = figures.get("parts", 1)
        self.side_rows, self.eval_rows = figures.get("side_rows"), figures.get("eval_rows")


def split(inputs: Inputs, parts: int, *, by_rows: bool = False) -> Iterator[tuple[Inputs, float]]:
    """A micro-batch in parts of nearly equally many rows, each with its share of the scored tokens (or rows).

    Parts without a scored token are left out, unless all are.
    """
    rows = len(inputs["input_ids"])
    edges = [rows * i // parts for i in range(parts + 1)]
    pieces = [
        {k: v[a:b] if isinstance(v, Tensor) and v.dim() else v for k, v in inputs.items()}
        for a, b in pairwise(edges)
        if b > a
    ]
    scored = [count_items(piece["labels"], by_rows=by_rows) for piece in pieces]
    total = sum(scored)
    for piece, count in zip(pieces, scored, strict=True):
        if not total:  # unless all are without
            yield piece, 1.0 / len(pieces)
        elif count:
            yield piece, count / total


def in_several_processes(error: Exception) -> ResourceError | None:
    """The refusal that stands for running out of memory beside other processes; None for anything else."""
    if world() == 1 or not out_of_memory(error):
        return None
    return ResourceError(
        f"out of memory in one of {world()} processes, which must not part ways: {str(error).splitlines()[0][:200]}",
        remedy="start again with half of per_device_train_batch_size and twice gradient_accumulation_steps (the same "
        "batch), a smaller safety_micro_batch_size, or gradient_checkpointing=True (under `train:` in a run file)",
    )


def release() -> None:
    """Free what only cycles of references still hold, and hand the device's memory back."""
    gc.collect()
    free_memory()
