"""One safety batch at the current parameters: degradations of every row, and one gradient, without touching `.grad`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.constraint.completion import deterministic
from holdfast.constraint.degradation import degradation, slope
from holdfast.constraint.gradients import ParameterSpace, Vector
from holdfast.constraint.passes import Forward
from holdfast.core.ranks import gather_rows, rank, world
from holdfast.data import streams
from holdfast.trainers.safety import SafetySet
from holdfast.trainers.side_pass import side_gradient


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
    micro-batches and ranks. A micro-batch in which no term has a slope gets no backward (but under FSDP2): its
    gradient is zero.
    """
    found: list[Tensor] = []
    # FSDP2 frees what a forward gathered in its backward, which must therefore come.
    sharded = any(isinstance(p, DTensor) for p in space.params)
    reference = safety.constraint_reference[positions]

    def terms(model: Any, batch: dict[str, Tensor], places: list[int]) -> Tensor:
        d = degradation(model, batch, reference[places], safety.constraint)
        found.append(d.detach())
        if not sharded and not bool(slope(weight, d).any()):
            d = d.detach()
        return weight(d) / len(positions)

    rows = [safety.constraint_set[i] for i in positions]
    _, gradient = side_gradient(forward, rows, terms, space, micro_batch)
    degradations = gather_rows(torch.cat(found)).double().cpu()
    return SafetyBatch(torch.tensor(positions), degradations), gradient


def safety_forward(forward: Forward, safety: SafetySet, positions: list[int]) -> Tensor:
    """Differentiable degradations of this rank's share of the batch, dropout off in the forward."""
    mine = streams.shard(positions, rank(), world())
    batch = forward.batch([safety.constraint_set[i] for i in mine])
    with deterministic(forward.model), forward.precision():
        return degradation(forward.model, batch, safety.constraint_reference[mine], safety.constraint)
