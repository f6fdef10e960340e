"""Forward passes over a whole set of examples: batched by length, shared among ranks, on the CPU at the end.

The device is asked for its results once, at the end: while it works on a batch the host pads and sends the next.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.constraint.chance import ChanceConstraint
from holdfast.constraint.gradients import reshard
from holdfast.core.ranks import gather_objects, rank, world
from holdfast.core.seeding import generator
from holdfast.core.units import KL_UNITS
from holdfast.data.encode import Encoded, collate
from holdfast.scoring.completion import Batch, CompletionLosses, States, deterministic, kl_of, losses_of
from holdfast.scoring.degradation import in_unit
from holdfast.scoring.transfer import to_device

logger = logging.getLogger(__name__)

QUIET = 15.0  # seconds between two lines about how far the passes are, at least

Columns = Callable[[Batch, list[Encoded]], Tensor]
"""A batch and its rows to (columns, rows)."""


@dataclass(frozen=True)
class Forward:
    """How to run a model over encoded examples: device, padding, batch size and precision in one place."""

    model: Any
    _: KW_ONLY
    pad_token_id: int
    batch_size: int
    device: torch.device
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext  # training's autocast, so that passes agree
    # theta_0 on examples (`KeptReference`); None where switching the adapters off gives it
    kept: Callable[[Sequence[Encoded]], States] | None = None

    def resized(self, batch_size: int) -> "Forward":
        return replace(self, batch_size=batch_size)

    def batch(self, rows: Sequence[Encoded]) -> dict[str, Tensor]:
        """Right-padded tensors on the model's device."""
        return {name: to_device(tensor, self.device) for name, tensor in collate(rows, self.pad_token_id).items()}

    def reference_states(self, rows: Sequence[Encoded], constraint: ChanceConstraint) -> States | None:
        """What is kept of theta_0 on these rows, where the unit looks at it."""
        return None if self.kept is None or constraint.unit not in KL_UNITS else self.kept(rows)

    def batches(self, examples: Sequence[Encoded], *, shuffle: int | None = None) -> list[list[int]]:
        """Positions of the examples that run together: sorted by length, or an arbitrary composition by a seed."""
        order = sorted(range(len(examples)), key=lambda i: (len(examples[i].input_ids), i))
        if shuffle is not None:
            order = generator(shuffle, "batch composition").permutation(len(examples)).tolist()
        return [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]

    @torch.no_grad()
    def over(self, examples: Sequence[Encoded], function: Columns, *, first_k: int, shuffle: int | None) -> Tensor:
        """Apply `function(batch, its rows)` -> (columns, rows) to all examples; float64 on the CPU, in the order given.

        Batches do not depend on the number of ranks: rank r takes every world-th batch, and ranks that have fewer
        repeat their last one (sharded models need every rank in every forward). `shuffle` is a seed for an arbitrary
        batch composition instead of the one sorted by length.
        """
        batches = self.batches(examples, shuffle=shuffle)
        rounds = -(-len(batches) // world())
        said = time.monotonic()
        mine: list[int] = []
        found: list[Tensor] = []
        with deterministic(self.model), self.precision():
            for i in range(rounds):
                at = i * world() + rank()
                positions = batches[min(at, len(batches) - 1)]
                rows = [examples[j] for j in positions]
                batch = Batch.of(rows, pad_token_id=self.pad_token_id, first_k=first_k, device=self.device)
                values = function(batch, rows)
                if at < len(batches):
                    mine += positions
                    found.append(values.double())
                if rank() == 0 and time.monotonic() - said >= QUIET and i + 1 < rounds:
                    said = time.monotonic()
                    done = sum(len(one) for one in batches[: at + world()])
                    logger.info("measured %d of %d examples", done, len(examples))
        own = torch.cat(found, dim=1).cpu() if found else None
        reshard(self.model)
        parts = [(places, part) for places, part in gather_objects((mine, own)) if part is not None]
        columns = torch.empty(len(parts[0][1]), len(examples), dtype=torch.float64)
        for places, part in parts:
            columns[:, places] = part
        return columns

    def losses(self, examples: Sequence[Encoded], first_k: int, shuffle: int | None = None) -> CompletionLosses:
        return self._summed(examples, lambda batch, _: losses_of(self.model, batch), first_k, shuffle)

    def kl(self, examples: Sequence[Encoded], first_k: int, shuffle: int | None = None) -> CompletionLosses:
        """KL from theta_0: by what is kept of it, else with the adapters switched off."""
        kept: Callable[[Sequence[Encoded]], States | None] = self.kept or (lambda _: None)
        return self._summed(examples, lambda batch, rows: kl_of(self.model, batch, kept(rows)), first_k, shuffle)

    def _summed(
        self, examples: Sequence[Encoded], sums: Columns, first_k: int, shuffle: int | None
    ) -> CompletionLosses:
        total, first = self.over(examples, sums, first_k=first_k, shuffle=shuffle)
        tokens = torch.from_numpy(np.array([example.n_labels for example in examples], dtype=np.float64))
        return CompletionLosses(total, tokens, first, tokens.clamp(max=first_k))

    def degradations(
        self, examples: Sequence[Encoded], reference: Tensor, constraint: ChanceConstraint, shuffle: int | None = None
    ) -> Tensor:
        """`D_i` of every example at the current parameters; `reference` are its losses at theta_0, in the unit."""
        if not examples:  # a run may keep no monitor split
            return torch.empty(0, dtype=torch.float64)
        k = constraint.first_k
        if constraint.unit in KL_UNITS:
            return in_unit(self.kl(examples, k, shuffle), constraint)
        return in_unit(self.losses(examples, k, shuffle), constraint) - reference.double().cpu()
