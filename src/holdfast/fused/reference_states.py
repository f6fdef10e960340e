"""Hidden states at theta_0 of every constraint row's completion, kept in host memory (units `kl_token` and `kl_first`).

The reference's distribution of a row never changes, and each row comes up again and again: one pass over the set, with
the adapter off, spares every step a forward over its safety rows. All rows are passed over at the start and in an order
of their own, so that what is kept does not depend on when a run was interrupted.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from holdfast.data.encode import Encoded
from holdfast.fused.body import EagerPasses
from holdfast.fused.packed_rows import encoded_rows, scored
from holdfast.scoring.transfer import to_device

LIMIT = 2 * 2**30  # bytes of host memory
PASS_TOKENS = 4096  # at one time on the device


class ReferenceStates:
    """States of the scored tokens, row by row."""

    def __init__(self, table: Tensor, places: dict[str, slice], device: torch.device) -> None:
        self._table, self._places, self._device = table, places, device

    @classmethod
    @torch.no_grad()
    def of(cls, passes: EagerPasses, examples: Sequence[Encoded], device: torch.device) -> Self:
        """Pass over all examples with the adapter off."""
        unique = {example.id: example for example in examples}
        ordered = sorted(unique.values(), key=lambda e: (len(e.input_ids), e.id))
        parts, places, start = [], {}, 0
        for batch in _batches(ordered):
            rows = [encoded_rows(batch)]
            at = scored(rows)[0].at.to(device)
            parts.append(passes.states(rows, adapters=False).index_select(0, at).cpu())
            for example in batch:
                places[example.id] = slice(start, start + example.n_labels)
                start += example.n_labels
        return cls(torch.cat(parts), places, device)

    def __call__(self, rows: Sequence[Encoded]) -> Tensor:
        """(scored tokens, width) of the rows, one after the other, on the device."""
        return to_device(torch.cat([self._table[self._places[row.id]] for row in rows]), self._device)


def fits(examples: Sequence[Encoded], width: int, dtype: torch.dtype) -> bool:
    """Whether the states of all examples stay within `LIMIT`."""
    tokens = sum({example.id: example.n_labels for example in examples}.values())
    return tokens * width * dtype.itemsize <= LIMIT


def _batches(ordered: Sequence[Encoded]) -> list[list[Encoded]]:
    """Consecutive examples of at most `PASS_TOKENS` tokens, or a single longer one."""
    found: list[list[Encoded]] = []
    held = PASS_TOKENS + 1
    for example in ordered:
        if held + len(example.input_ids) > PASS_TOKENS:
            found.append([])
            held = 0
        found[-1].append(example)
        held += len(example.input_ids)
    return found
