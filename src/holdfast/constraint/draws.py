"""Which rows of a safety set a step measures, where those that matter more are drawn more often.

After some steps most rows of a set have hardly moved: their term phi_i and its gradient are near zero, and a batch of
them says nothing. With phi_i as each row was last seen (and for a row not seen yet their mean), row i is drawn with

    p_i = (1 - SHARE) / N + SHARE phi_i / sum_j phi_j,

and weighted by w_i = 1 / (N p_i), at most 1 / (1 - SHARE):

    mean_i phi_i = E[ mean_{i in batch} w_i phi_i ],      the same for the gradient.

A batch is a systematic sample: b points at equal distances on the line on which row i has length p_i. Their offset
moves by the golden ratio from step to step, so that batches fill each other's gaps. The seed draws the first offset;
over it each point is uniform, and so the weighted mean is unbiased for a table that is given. In a run the table
follows from earlier offsets, so that this is not exact there.

What is kept of a row is its term above f (`constraint.anchor`), and with an anchor as a share of r^2, the squared
distance from theta_0, since a KL grows with it: a row seen early would otherwise look safe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.constraint.estimators import checked_size, loaded_table, remember

SHARE = 0.5  # of the draws that go by what was seen; the rest are the same for all rows
GOLDEN = 0.6180339887498949


class Batch(NamedTuple):
    """Positions in the constraint split, and what the terms of these rows are multiplied by."""

    positions: list[int]
    weights: Tensor  # float64, on the CPU


class ImportanceDraws:
    """The terms of all rows as they were last seen; part of a checkpoint."""

    def __init__(self, size: int) -> None:
        self.seen = torch.full((checked_size(size),), torch.nan, dtype=torch.float64)

    def probabilities(self) -> Tensor:
        """p_i of every row."""
        size, known = len(self.seen), ~self.seen.isnan()
        if not bool(known.any()):
            return torch.full((size,), 1.0 / size, dtype=torch.float64)
        terms = torch.where(known, self.seen, self.seen[known].mean())
        total = terms.sum()
        shares = terms / total if total > 0.0 else torch.full_like(terms, 1.0 / size)
        return (1.0 - SHARE) / size + SHARE * shares

    def batch(self, size: int, step: int, first: float) -> Batch:
        """`size` rows for a step, from the first offset in [0, 1) that a seed draws."""
        p = self.probabilities()
        offset = (first + step * GOLDEN) % 1.0
        points = (offset + torch.arange(size, dtype=torch.float64)) / size
        at = torch.searchsorted(p.cumsum(0), points, right=True).clamp(max=len(p) - 1)  # rounding: the sum may miss 1
        return Batch(at.tolist(), 1.0 / (len(p) * p[at]))

    def remember(self, index: Tensor, terms: Tensor, square: float | None = None, floor: float = 0.0) -> None:
        """Note a batch's terms above their floor, seen at this squared distance from theta_0; none of it."""
        if square != 0.0:
            remember(self.seen, index, (terms - floor).clamp(min=0.0) / (1.0 if square is None else square))

    def state_dict(self) -> dict[str, Tensor]:
        return {"seen": self.seen.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = loaded_table({"table": state["seen"]}, len(self.seen))
