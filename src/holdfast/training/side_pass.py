"""A pass over rows beside the task's: their losses and one gradient, without touching `.grad` or the random state.

The pass runs on the unwrapped module and reduces its gradient itself, so that DDP's buckets and the task gradient's
accumulation are left alone. Under FSDP2 the engine reduces, and the task gradient is moved aside meanwhile; under
ZeRO-2 `training.zero` differentiates. Dropout is off, so that two passes over the same rows see the same function, and
a term of weight zero changes no bit of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.constraint.gradients import ParameterSpace, Vector, reshard, shard
from holdfast.core.ranks import gather_rows, rank, sum_in_place, world
from holdfast.data import streams
from holdfast.data.encode import Encoded
from holdfast.fused.support import own_dropout
from holdfast.scoring.completion import completion_kl, completion_losses, deterministic
from holdfast.scoring.degradation import degradation, slope
from holdfast.scoring.forward import Forward
from holdfast.training.safety import SafetySet
from holdfast.training.zero import PartSpace, SourceGradient

if TYPE_CHECKING:
    from holdfast.training.config import SafetyArguments

RowLoss = Callable[[Any, dict[str, Tensor], list[int]], Tensor]
"""`loss(model, batch, positions)`: one differentiable number per row; what is differentiated is their sum over all rows
of all ranks. `positions` are the rows' places in the list given to `side_gradient`."""
Term = Callable[[Tensor], Tensor]
"""From degradations to the per-example terms of a constraint, `phi(D - tau)`; differentiable."""


def side_gradient(
    forward: Forward, rows: Sequence[Encoded], loss: RowLoss, space: ParameterSpace, micro_batch: int
) -> tuple[Tensor, Vector]:
    """Losses of all rows, in order (float64, on the CPU), and the gradient of their sum."""
    mine = streams.shard(range(len(rows)), rank(), world())
    sharded = _under_fsdp2(space)
    scale = world() if sharded else 1  # FSDP2 averages over ranks where we need the sum
    sources = SourceGradient(space) if isinstance(space, PartSpace) else None
    task_gradient = [p.grad for p in space.params]
    measured: list[Tensor] = []
    try:
        for p in space.params:
            p.grad = None
        with deterministic(forward.model):
            for i in range(0, len(mine), micro_batch):
                positions = mine[i : i + micro_batch]
                batch = forward.batch([rows[j] for j in positions])
                with forward.precision():
                    values = loss(forward.model, batch, positions)
                if values.requires_grad and sources is not None:
                    sources.add(values.sum())
                elif values.requires_grad:
                    (values.sum() * scale).backward()  # type: ignore[no-untyped-call]
                measured.append(values.detach())
        gradient = [torch.zeros_like(shard(p)) if p.grad is None else shard(p.grad).clone() for p in space.params]
    finally:
        for p, grad in zip(space.params, task_gradient, strict=True):
            p.grad = grad
    if sources is not None:
        gradient = sources.reduced()
    elif not sharded:
        sum_in_place(gradient)
    return gather_rows(torch.cat(measured)).double().cpu(), gradient


def _under_fsdp2(space: ParameterSpace) -> bool:
    return not isinstance(space, PartSpace) and any(isinstance(p, DTensor) for p in space.params)


def scored_tokens(rows: Sequence[Encoded]) -> int:
    return sum(row.n_labels for row in rows)


@dataclass(frozen=True)
class TokenMean:
    """Terms of a mean over all completion tokens of a batch: of their NLL, or of the KL from a reference."""

    total: int  # completion tokens of all rows
    reference: Callable[[], Any] | None = None  # makes the context in which the model is pi_0; None for the NLL

    def __call__(self, model: nn.Module, batch: dict[str, Tensor], positions: list[int]) -> Tensor:
        if self.reference is None:
            return completion_losses(model, batch, first_k=1).total / self.total
        return completion_kl(model, batch, 1, self.reference).total / self.total


def token_mean_nll(rows: Sequence[Encoded]) -> TokenMean:
    """`sum of token NLLs / number of tokens` over the whole batch: what SFT minimises on these rows."""
    return TokenMean(scored_tokens(rows))


def token_mean_kl(rows: Sequence[Encoded], reference: Callable[[], AbstractContextManager[None]]) -> TokenMean:
    """The mean over all completion tokens of `KL(pi_0 || pi_theta)`, in nats; `reference`: `run.theta_0.active`."""
    return TokenMean(scored_tokens(rows), reference)


def safety_gradient(
    forward: Forward, safety: SafetySet, positions: list[int], term: Term, space: ParameterSpace, micro_batch: int,
    weights: Tensor | None = None,
) -> tuple[Tensor, Vector]:  # fmt: skip
    """Degradations of the batch (float64, on the CPU) and the gradient of `mean_i w_i term(D)_i` over all its rows.

    `term` maps degradations to the per-example terms of the constraint (`phi(D - tau)`), so the mean splits over
    micro-batches and ranks. A micro-batch in which no term has a slope gets no backward (but under FSDP2): its
    gradient is zero.
    """
    measured: list[Tensor] = []
    # FSDP2 frees what a forward gathered in its backward, which must therefore come.
    sharded = _under_fsdp2(space)
    rows, reference, constraint = safety.rows(positions), safety.constraint_reference[positions], safety.constraint

    def terms(model: nn.Module, batch: dict[str, Tensor], places: list[int]) -> Tensor:
        states = forward.reference_states([rows[i] for i in places], constraint)
        d = degradation(model, batch, reference[places], constraint, states)
        measured.append(d.detach())
        if not sharded and not bool(slope(term, d).any()):
            d = d.detach()
        return weighted(term(d), None if weights is None else weights[places]) / len(positions)

    _, gradient = side_gradient(forward, rows, terms, space, micro_batch)
    return gather_rows(torch.cat(measured)).double().cpu(), gradient


def weighted(terms: Tensor, weights: Tensor | None) -> Tensor:
    """`w_i term(D)_i`, where the rows were not drawn alike (`constraint.draws`)."""
    return terms if weights is None else terms * weights.to(terms)


def safety_forward(forward: Forward, safety: SafetySet, positions: list[int]) -> Tensor:
    """Differentiable degradations of this rank's share of the batch, dropout off in the forward."""
    mine = streams.shard(positions, rank(), world())
    rows, constraint = safety.rows(mine), safety.constraint
    states = forward.reference_states(rows, constraint)
    with deterministic(forward.model), forward.precision():
        values = degradation(forward.model, forward.batch(rows), safety.constraint_reference[mine], constraint, states)
    if not values.requires_grad:  # no backward will come
        reshard(forward.model)
    return values


def may_share_backward(model: nn.Module, args: SafetyArguments) -> bool:
    """Whether a forward without dropout may share the task's backward: not with dropout under gradient checkpointing.

    Layers are then run again in the backward, when dropout is on again. Nor with re-entrant checkpointing under DDP:
    two passes reach a parameter one by one, and DDP counts it as ready twice.
    """
    if not args.gradient_checkpointing:
        return True
    if (args.gradient_checkpointing_kwargs or {}).get("use_reentrant") and world() > 1:
        return False
    return not any((isinstance(m, nn.Dropout) and m.p > 0) or own_dropout(m) for m in model.modules())
