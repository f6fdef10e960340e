"""The completion tokens of packed rows: where their predictions are, and to which row each belongs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.data.encode import IGNORE
from holdfast.fused.packed_rows import Row
from holdfast.scoring.transfer import to_device


@dataclass(frozen=True)
class Scored:
    """The completion tokens of one group of rows.

    Attributes:
        at: (scored): the packed positions that predict them.
        targets: (scored): the tokens.
        cell: (scored): row * width + place in the completion.
        counts: (rows): scored tokens of every row.
        width: of the longest completion.
    """

    at: Tensor
    targets: Tensor
    cell: Tensor
    counts: Tensor
    width: int

    def per_row(self, values: Tensor, first: int | None = None) -> Tensor:
        """Sum one value per token to one per row, in float64; over the `first` tokens of each row where given."""
        cells = torch.zeros(len(self.counts) * self.width, dtype=torch.float64, device=values.device)
        table = cells.index_copy(0, self.cell, values.double()).view(len(self.counts), self.width)
        return table[:, :first].sum(1)

    def to(self, device: torch.device) -> "Scored":
        """The same on a device."""
        at, targets, cell, counts = (to_device(t, device) for t in (self.at, self.targets, self.cell, self.counts))
        return Scored(at, targets, cell, counts, self.width)


def scored(groups: Sequence[Sequence[Row]]) -> list[Scored]:
    """The completion tokens of every group, at their places in the layout of all of them."""
    found, start = [], 0
    for group in groups:
        at: list[Any] = []
        targets: list[Any] = []
        counts: list[int] = []
        for ids, labels in group:
            following = np.asarray(labels)[1:]
            here = np.flatnonzero(following != IGNORE)
            at.append(start + here)
            targets.append(following[here])
            counts.append(len(here))
            start += len(ids)
        width = max(counts, default=1) or 1
        cells = [r * width + np.arange(count) for r, count in enumerate(counts)]
        found.append(
            Scored(
                torch.from_numpy(_joined(at)),
                torch.from_numpy(_joined(targets)),
                torch.from_numpy(_joined(cells)),
                torch.tensor(counts, dtype=torch.float64),
                width,
            )
        )
    return found


def _joined(parts: list[Any]) -> Any:
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
