"""Rows of a batch laid end to end: no padding where tokens do not meet, and the places of every token where they do.

Where they meet (see `body`) rows may have to be padded after all. They are then sorted by length into segments of
equally many rows, each padded to its own longest, so that short rows are not padded to the longest of all.

`scored` finds the completion tokens: where their predictions are, and to which row each belongs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.data.encode import IGNORE, Encoded
from holdfast.scoring.transfer import to_device

Row = tuple[Any, Any]
"""Token ids and labels of one row, both as long as it is."""
Groups = Sequence[Sequence[Row]]
SEGMENTS = 2


@dataclass(frozen=True)
class Sizes:
    """How large a layout is; a recorded pass is made for one size, and batches are filled up to it."""

    rows: int
    tokens: int
    widths: tuple[int, ...]  # of the segments, each the length of its longest row or more
    filling: int = 0  # a bound on the row that fills a layout up, which lies in no segment

    @property
    def counts(self) -> tuple[int, ...]:
        n = len(self.widths)
        return tuple(self.rows * (i + 1) // n - self.rows * i // n for i in range(n))


@dataclass(frozen=True)
class Layout:
    """What the layers of a model need to keep packed rows apart.

    `spread` is the token at each place of the padded segments, one after the other; beyond a row's end its own last
    one, so that no number of another row, finite or not, is ever near.
    """

    input_ids: Tensor  # (1, tokens)
    position_ids: Tensor  # (1, tokens); each row counts from zero, a filling row stays there
    boundaries: Tensor  # (rows + 1), int32: where rows begin, and the end; a filling row comes last
    spread: Tensor  # (places)
    gather: Tensor  # (tokens): each token's place
    membership: Tensor  # (tokens, groups), float32: one where a token belongs to a group, zero elsewhere
    padded_membership: Tensor  # (places, groups): the same in the padded segments
    sizes: Sizes  # rows and width of every segment

    @property
    def longest(self) -> int:
        """A bound on the rows' lengths, the filling one's too: attention leaves what lies beyond unwritten."""
        return max(*self.sizes.widths, self.sizes.filling)

    @property
    def segments(self) -> list[tuple[int, int]]:
        return list(zip(self.sizes.counts, self.sizes.widths, strict=True))

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sizes"}

    def to(self, device: torch.device) -> "Layout":
        moved = {name: to_device(tensor, device) for name, tensor in self.tensors().items()}
        return Layout(**moved, sizes=self.sizes)


class Current:
    """The layout of the pass in progress, where layers find it."""

    layout: Layout | None = None  # outside a pass
    segment: int | None = None  # that the layer in progress sees; None where it sees all tokens
    dropout: bool = False  # whether the adapter drops inputs of group 0

    @property
    def rows(self) -> Layout:
        """The layout, in a pass."""
        assert self.layout is not None, "packed rows are only known in a pass"
        return self.layout

    @property
    def membership(self) -> Tensor:
        """Which of the tokens that a layer sees belong to which group."""
        if self.segment is None:
            return self.rows.membership
        places = [rows * width for rows, width in self.rows.segments]
        return torch.split(self.rows.padded_membership, places)[self.segment]


CURRENT = Current()


def encoded_rows(rows: Sequence[Encoded]) -> list[Row]:
    return [(row.input_ids, row.labels) for row in rows]


def padded_rows(batch: dict[str, Tensor]) -> list[Row]:
    """Ids and labels of the rows of a padded batch, on whichever side the padding is."""
    ids, labels, real = (batch[name].cpu().numpy() for name in ("input_ids", "labels", "attention_mask"))
    return [(i[m], y[m]) for i, y, m in zip(ids, labels, real.astype(bool), strict=True)]


def sizes(groups: Groups, *, rows: int | None = None, segments: int = SEGMENTS) -> Sizes:
    """What the groups' rows need; `rows`, where there are fewer, are filled up with empty ones."""
    lengths = [len(ids) for group in groups for ids, _ in group]
    count = len(lengths) if rows is None else rows
    ordered = sorted([0] * (count - len(lengths)) + lengths)
    ends = np.cumsum(Sizes(count, 0, (1,) * min(segments, count)).counts)
    return Sizes(count, sum(lengths), tuple(max(ordered[end - 1], 1) for end in ends))


def lay_out(groups: Groups, fill: Sizes | None = None) -> Layout:
    """Lay the rows of all groups end to end, group by group.

    `fill` is at least what they need; empty rows, and tokens of a last row that belongs to no group, fill it up.
    """
    rows = [ids for group in groups for ids, _ in group]
    group_of = [g for g, group in enumerate(groups) for _ in group]
    size = sizes(groups) if fill is None else fill
    lengths = np.zeros(size.rows, np.int64)
    lengths[: len(rows)] = [len(ids) for ids in rows]
    first, order = _first_places(lengths, size)
    ends = np.cumsum(lengths)
    if fill is not None:
        lengths = np.append(lengths, size.tokens - lengths.sum())
        first = np.append(first, 0)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    row_of = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(starts[-1]) - starts[:-1][row_of]
    real = int(sum(len(ids) for ids in rows))
    positions[real:] = 0  # a long filling must not ask for positions that a model does not have
    gather = first[row_of] + positions
    gather[real:] = 0  # what filling tokens see does not matter
    spread = np.repeat((ends[order] - 1).clip(0), np.repeat(size.widths, size.counts))
    spread[gather[:real]] = np.arange(real)
    ids = np.zeros(starts[-1], np.int64)
    membership = np.zeros((starts[-1], len(groups)), np.float32)
    for row, group, start in zip(rows, group_of, starts, strict=False):
        ids[start : start + len(row)] = row
        membership[start : start + len(row), group] = 1.0
    padded_membership = np.zeros((len(spread), len(groups)), np.float32)
    padded_membership[gather[:real]] = membership[:real]
    return Layout(
        input_ids=torch.from_numpy(ids)[None],
        position_ids=torch.from_numpy(positions)[None],
        boundaries=torch.from_numpy(starts.astype(np.int32)),
        spread=torch.from_numpy(spread),
        gather=torch.from_numpy(gather),
        membership=torch.from_numpy(membership),
        padded_membership=torch.from_numpy(padded_membership),
        sizes=size,
    )


def _first_places(lengths: NDArray[np.int64], size: Sizes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each row begins in the padded segments, and the rows in that order: shorter ones first."""
    begins, start = [], 0
    for count, width in zip(size.counts, size.widths, strict=True):
        begins.append(start + width * np.arange(count))
        start += count * width
    first = np.zeros(len(lengths), np.int64)
    order = np.argsort(lengths, kind="stable")
    first[order] = np.concatenate(begins)
    return first, order


@dataclass(frozen=True)
class Scored:
    """The completion tokens of one group of rows."""

    at: Tensor  # (scored): the packed positions that predict them
    targets: Tensor  # (scored): the tokens
    cell: Tensor  # (scored): row * width + place in the completion
    counts: Tensor  # (rows): scored tokens of every row
    width: int  # of the longest completion

    def per_row(self, values: Tensor, first: int | None = None) -> Tensor:
        """Sum one value per token to one per row, in float64; over the `first` tokens of each row where given."""
        cells = torch.zeros(len(self.counts) * self.width, dtype=torch.float64, device=values.device)
        table = cells.index_copy(0, self.cell, values.double()).view(len(self.counts), self.width)
        return table[:, :first].sum(1)

    def to(self, device: torch.device) -> "Scored":
        at, targets, cell, counts = (to_device(t, device) for t in (self.at, self.targets, self.cell, self.counts))
        return Scored(at, targets, cell, counts, self.width)


def scored(groups: Groups) -> list[Scored]:
    """The completion tokens of every group, at their places in the layout of all of them."""
    found, start = [], 0
    for group in groups:
        begins = start + np.cumsum([0, *(len(ids) for ids, _ in group)])
        following = [np.asarray(labels)[1:] for _, labels in group]
        here = [np.flatnonzero(labels != IGNORE) for labels in following]
        counts = [len(places) for places in here]
        width = max(counts, default=1) or 1
        at = [begin + places for begin, places in zip(begins[:-1], here, strict=True)]
        targets = [labels[places] for labels, places in zip(following, here, strict=True)]
        cells = [r * width + np.arange(count) for r, count in enumerate(counts)]
        where, tokens, cell = (
            torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts])) for parts in (at, targets, cells)
        )
        found.append(Scored(where, tokens, cell, torch.tensor(counts, dtype=torch.float64), width))
        start = int(begins[-1])
    return found
