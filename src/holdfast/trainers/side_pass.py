"""A pass over rows beside the task's: their losses and one gradient, without touching `.grad` or the random state.

The pass runs on the unwrapped module and reduces its gradient itself, so that DDP's buckets and the task gradient's
accumulation are left alone. Under FSDP2 the engine reduces, and the task gradient is moved aside meanwhile. Dropout is
off, so that two passes over the same rows see the same function, and a term of weight zero changes no bit of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.constraint.completion import completion_kl, completion_losses, deterministic
from holdfast.constraint.gradients import ParameterSpace, Vector, shard
from holdfast.constraint.passes import Forward
from holdfast.core.ranks import gather_rows, rank, sum_in_place, world
from holdfast.data import streams
from holdfast.data.encode import Encoded

RowLoss = Callable[[Any, dict[str, Tensor], list[int]], Tensor]
"""`loss(model, batch, positions)`: one differentiable number per row; what is differentiated is their sum over all rows
of all ranks. `positions` are the rows' places in the list given to `side_gradient`."""


def side_gradient(
    forward: Forward, rows: Sequence[Encoded], loss: RowLoss, space: ParameterSpace, micro_batch: int
) -> tuple[Tensor, Vector]:
    """Losses of all rows, in order (float64, on the CPU), and the gradient of their sum."""
    mine = streams.shard(range(len(rows)), rank(), world())
    sharded = any(isinstance(p, DTensor) for p in space.params)
    scale = world() if sharded else 1  # FSDP2 averages over ranks where we need the sum
    task_gradient = [p.grad for p in space.params]
    found: list[Tensor] = []
    try:
        for p in space.params:
            p.grad = None
        with deterministic(forward.model):
            for i in range(0, len(mine), micro_batch):
                positions = mine[i : i + micro_batch]
                batch = forward.batch([rows[j] for j in positions])
                with forward.precision():
                    values = loss(forward.model, batch, positions)
                if values.requires_grad:
                    (values.sum() * scale).backward()  # type: ignore[no-untyped-call]
                found.append(values.detach())
        gradient = [torch.zeros_like(shard(p)) if p.grad is None else shard(p.grad).clone() for p in space.params]
    finally:
        for p, grad in zip(space.params, task_gradient, strict=True):
            p.grad = grad
    if not sharded:
        sum_in_place(gradient)
    return gather_rows(torch.cat(found)).double().cpu(), gradient


def scored_tokens(rows: Sequence[Encoded]) -> int:
    """Completion tokens of all rows."""
    return sum(row.n_labels for row in rows)


@dataclass(frozen=True)
class TokenMean:
    """Terms of a mean over all completion tokens of a batch: of their NLL, or of the KL from a reference.

    Attributes:
        tokens: completion tokens of every row.
        reference: makes the context in which the model is pi_0; None for the NLL.
    """

    tokens: Tensor
    reference: Callable[[], Any] | None = None

    @property
    def total(self) -> int:
        """Completion tokens of all rows."""
        return int(self.tokens.sum())

    def __call__(self, model: Any, batch: dict[str, Tensor], positions: list[int]) -> Tensor:
        """One number per row."""
        if self.reference is None:
            return completion_losses(model, batch, first_k=1).total / self.total
        per_row = completion_kl(model, batch, self.reference)
        return per_row * self.tokens[positions].to(per_row) / self.total


def token_mean_nll(rows: Sequence[Encoded]) -> TokenMean:
    """`sum of token NLLs / number of tokens` over the whole batch: what SFT minimises on these rows."""
    return TokenMean(_tokens(rows))


def token_mean_kl(rows: Sequence[Encoded], reference: Callable[[], Any]) -> TokenMean:
    """The mean over all completion tokens of `KL(pi_0 || pi_theta)`, in nats.

    Args:
        reference: makes the context in which the model is pi_0 (`TrainingRun.at_reference`).
    """
    return TokenMean(_tokens(rows), reference)


def _tokens(rows: Sequence[Encoded]) -> Tensor:
    return torch.tensor([row.n_labels for row in rows], dtype=torch.float64)
