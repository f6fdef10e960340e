"""One safety batch at the current parameters: degradations of every row, and one gradient, without touching `.grad`.

The pass runs on the unwrapped module and reduces its gradient itself, so that DDP's buckets and the task gradient's
accumulation are left alone. Under FSDP2 the engine reduces, and the task gradient is moved aside meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.constraint.completion import deterministic
from holdfast.constraint.degradation import degradation
from holdfast.constraint.gradients import ParameterSpace, Vector, shard
from holdfast.constraint.passes import Forward
from holdfast.core.ranks import gather_rows, rank, sum_in_place, world
from holdfast.data import streams
from holdfast.trainers.safety import SafetySet


@dataclass(frozen=True)
class SafetyBatch:
    """A global safety batch: positions in the constraint split and their degradations, float64 on the CPU."""

    index: Tensor
    degradations: Tensor


def safety_gradient(
    forward: Forward,
    safety: SafetySet,
    positions: list[int],
    weight: Callable[[Tensor], Tensor],
    space: ParameterSpace,
    micro_batch: int,
) -> tuple[SafetyBatch, Vector]:
    """Degradations of the batch and the gradient of `mean_i weight(D)_i` over all its rows.

    `weight` maps degradations to the per-example terms of the constraint (`phi(D - tau)`), so the mean splits over
    micro-batches and ranks.
    """
    mine = streams.shard(positions, rank(), world())
    sharded = any(isinstance(p, DTensor) for p in space.params)
    # FSDP2 averages over ranks where we need the sum.
    scale = (world() if sharded else 1) / len(positions)
    task_gradient = [p.grad for p in space.params]
    found: list[Tensor] = []
    try:
        for p in space.params:
            p.grad = None
        with deterministic(forward.model):
            for i in range(0, len(mine), micro_batch):
                rows = mine[i : i + micro_batch]
                batch = forward.batch([safety.constraint_set[j] for j in rows])
                with forward.precision():
                    d = degradation(forward.model, batch, safety.constraint_reference[rows], safety.constraint)
                    loss = weight(d).sum() * scale
                loss.backward()  # type: ignore[no-untyped-call]
                found.append(d.detach())
        gradient = [torch.zeros_like(shard(p)) if p.grad is None else shard(p.grad).clone() for p in space.params]
    finally:
        for p, grad in zip(space.params, task_gradient, strict=True):
            p.grad = grad
    if not sharded:
        sum_in_place(gradient)
    degradations = gather_rows(torch.cat(found)).double().cpu()
    return SafetyBatch(torch.tensor(positions), degradations), gradient
