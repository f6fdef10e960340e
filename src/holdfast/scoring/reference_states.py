"""Hidden states at theta_0 of the completions that a run holds, kept in host memory (units of KL).

    p_0(token t) = softmax(head_0 h_t)      h_t: the hidden state that predicts token t, at theta_0

The reference's distribution of a row never changes: one pass over all rows spares every later one a forward at theta_0.
States are `tokens x width` numbers, where log-probabilities would be `tokens x vocabulary`; they are kept in the dtype
in which the head gets them.

A run without a fresh adapter has no other reference (`KeptReference`): its theta_0 is gone after the first step. All
rows are passed over before a checkpoint is loaded, in an order of their own, so that an interruption changes nothing.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from holdfast.constraint.gradients import reshard
from holdfast.core.errors import UnsupportedError
from holdfast.data.encode import Encoded
from holdfast.scoring.completion import Batch, States, deterministic
from holdfast.scoring.forward import Forward
from holdfast.scoring.head import Head
from holdfast.scoring.transfer import to_device

logger = logging.getLogger(__name__)

MOST = 16 * 2**30  # bytes of host memory, in each process


class ReferenceStates:
    """States of the scored tokens, row by row."""

    def __init__(self, table: Tensor, places: dict[str, slice], device: torch.device) -> None:
        self._table, self._places, self._device = table, places, device

    @classmethod
    @torch.no_grad()
    def of(
        cls, batches: Sequence[Sequence[Encoded]], states: Callable[[Sequence[Encoded]], Tensor], device: torch.device
    ) -> Self:
        """Those that `states` finds, batch by batch: (scored tokens, width), rows one after the other."""
        places, end = {}, 0
        for row in (row for batch in batches for row in batch):
            places[row.id] = slice(end, end + row.n_labels)
            end += row.n_labels
        table = torch.empty(0)
        for batch in batches:
            found = states(batch)
            if not len(table):
                table = torch.empty(end, found.shape[1], dtype=found.dtype)
            start = places[batch[0].id].start
            table[start : start + len(found)] = found
        return cls(table, places, device)

    def __call__(self, rows: Sequence[Encoded]) -> Tensor:
        """(scored tokens, width) of the rows, one after the other, on the device; a row may be cut short."""
        return to_device(torch.cat([self._table[self._places[row.id]][: row.n_labels] for row in rows]), self._device)


@dataclass(frozen=True)
class KeptReference:
    """theta_0 on the completions of some examples: their states, and the head that reads them."""

    states: ReferenceStates
    head: Head  # a copy where the head is trained

    @classmethod
    def of(cls, forward: Forward, examples: Sequence[Encoded]) -> Self:
        """Pass over all examples with the model as it is now. Every process keeps all of them."""
        head = Head(forward.model)
        head.keep()
        unique = list({example.id: example for example in examples}.values())
        size = sum(example.n_labels for example in unique) * head.weight.shape[1] * torch.float32.itemsize
        if size > MOST:
            raise UnsupportedError(
                "a unit of KL without a fresh adapter keeps the reference's hidden states: up to "
                f"{size / 2**30:.0f} GiB here, expected at most {MOST / 2**30:.0f}",
                remedy="hold fewer or shorter safety examples, train a fresh adapter, or use unit nll_token",
            )

        def states(rows: Sequence[Encoded]) -> Tensor:
            batch = Batch.of(rows, pad_token_id=forward.pad_token_id, first_k=1, device=forward.device)
            return States.of(forward.model, batch).hidden

        batches = [[unique[i] for i in positions] for positions in forward.batches(unique)]
        with deterministic(forward.model), forward.precision():
            kept = ReferenceStates.of(batches, states, forward.device)
        reshard(forward.model)
        logger.info("the reference's hidden states of %d examples are kept", len(unique))
        return cls(kept, head)

    def __call__(self, rows: Sequence[Encoded]) -> States:
        """The reference on these rows' completions, one after the other."""
        return States(self.states(rows), self.head)
