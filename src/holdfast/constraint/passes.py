"""Forward passes over a whole set of examples: batched by length, shared among ranks, on the CPU at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from holdfast.constraint.chance import ChanceConstraint
from holdfast.constraint.completion import CompletionLosses, completion_losses, deterministic
from holdfast.constraint.degradation import degradation
from holdfast.constraint.gradients import reshard
from holdfast.core.ranks import gather_objects, rank, world
from holdfast.core.seeding import generator
from holdfast.data.collate import collate
from holdfast.data.encode import Encoded

RowFunction = Callable[[dict[str, Tensor], list[int]], list[Tensor]]


class Forward:
    """How to run a model over encoded examples: device, padding, batch size and precision in one place.

    Args:
        precision: the autocast context of training, so that reference and training passes agree.
    """

    def __init__(
        self,
        model: Any,
        *,
        pad_token_id: int,
        batch_size: int,
        device: torch.device,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model, self.pad_token_id, self.batch_size = model, pad_token_id, batch_size
        self.device, self.precision = device, precision

    def resized(self, batch_size: int) -> Forward:
        """The same with other batches."""
        return Forward(
            self.model,
            pad_token_id=self.pad_token_id,
            batch_size=batch_size,
            device=self.device,
            precision=self.precision,
        )

    def batch(self, rows: Sequence[Encoded]) -> dict[str, Tensor]:
        """Right-padded tensors on the model's device."""
        return {name: tensor.to(self.device) for name, tensor in collate(rows, self.pad_token_id).items()}

    @torch.no_grad()
    def over(self, examples: Sequence[Encoded], function: RowFunction, *, shuffle: int | None = None) -> list[Tensor]:
        """Apply `function(batch, positions) -> [per-row tensors]` to all examples; rows come back in order.

        Batches do not depend on the number of ranks: rank r takes every world-th batch, and ranks that have fewer
        repeat their last one (sharded models need every rank in every forward).

        Args:
            shuffle: a seed for an arbitrary batch composition instead of the one sorted by length.
        """
        order = sorted(range(len(examples)), key=lambda i: (len(examples[i].input_ids), i))
        if shuffle is not None:
            order = generator(shuffle, "batch composition").permutation(len(examples)).tolist()
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        rounds = -(-len(batches) // world())
        mine: list[tuple[list[int], list[Tensor]]] = []
        with deterministic(self.model), self.precision():
            for i in range(rounds):
                at = i * world() + rank()
                positions = batches[min(at, len(batches) - 1)]
                found = [
                    t.detach().double().cpu() for t in function(self.batch([examples[j] for j in positions]), positions)
                ]
                if at < len(batches):
                    mine.append((positions, found))
        reshard(self.model)
        parts = [part for ranks_parts in gather_objects(mine) for part in ranks_parts]
        columns = [torch.empty(len(examples), dtype=torch.float64) for _ in parts[0][1]]
        for positions, found in parts:
            for column, values in zip(columns, found, strict=True):
                column[positions] = values
        return columns

    def losses(self, examples: Sequence[Encoded], first_k: int) -> CompletionLosses:
        """Completion losses of every example."""

        def rows(batch: dict[str, Tensor], _: list[int]) -> list[Tensor]:
            found = completion_losses(self.model, batch, first_k)
            return [found.total, found.tokens, found.first, found.first_tokens]

        return CompletionLosses(*self.over(examples, rows))

    def degradations(
        self,
        examples: Sequence[Encoded],
        reference: Tensor,
        constraint: ChanceConstraint,
        *,
        shuffle: int | None = None,
    ) -> Tensor:
        """`D_i` of every example at the current parameters.

        Args:
            reference: losses at theta_0 in the constraint's unit, one per example.
        """

        def rows(batch: dict[str, Tensor], positions: list[int]) -> list[Tensor]:
            return [degradation(self.model, batch, reference[positions], constraint)]

        if not examples:  # a run may keep no monitor split
            return torch.empty(0, dtype=torch.float64)
        return self.over(examples, rows, shuffle=shuffle)[0]
