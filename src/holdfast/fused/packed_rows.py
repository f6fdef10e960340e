"""Rows of a batch laid end to end: no padding where tokens do not meet, and the places of every token where they do.

Where they meet (see `row_mixing`) rows may have to be padded after all. They are then sorted by length into segments of
equally many rows, each padded to its own longest, so that short rows are not padded to the longest of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.data.encode import Encoded
from holdfast.scoring.transfer import to_device

Row = tuple[Any, Any]
"""Token ids and labels of one row, both as long as it is."""
Groups = Sequence[Sequence[Row]]
SEGMENTS = 2


@dataclass(frozen=True)
class Sizes:
    """How large a layout is; a recorded pass is made for one size, and batches are filled up to it.

    Attributes:
        widths: of the segments, each the length of its longest row or more.
        filling: a bound on the row that fills a layout up, which lies in no segment.
    """

    rows: int
    tokens: int
    widths: tuple[int, ...]
    filling: int = 0

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of every segment."""
        n = len(self.widths)
        return tuple(self.rows * (i + 1) // n - self.rows * i // n for i in range(n))


@dataclass(frozen=True)
class Layout:
    """What the layers of a model need to keep packed rows apart.

    Attributes:
        input_ids: (1, tokens).
        position_ids: (1, tokens); each row counts from zero, a filling row stays there.
        boundaries: (rows + 1), int32: where rows begin, and the end; a filling row comes last.
        spread: (places): the token at each place of the padded segments, one after the other; beyond a row's end its
            own last one, so that no number of another row, finite or not, is ever near.
        gather: (tokens): each token's place.
        membership: (tokens, groups), float32: one where a token belongs to a group, zero elsewhere.
        padded_membership: (places, groups): the same in the padded segments.
        sizes: rows and width of every segment.
    """

    input_ids: Tensor
    position_ids: Tensor
    boundaries: Tensor
    spread: Tensor
    gather: Tensor
    membership: Tensor
    padded_membership: Tensor
    sizes: Sizes

    @property
    def longest(self) -> int:
        """A bound on the rows' lengths, the filling one's too: attention leaves what lies beyond unwritten."""
        return max(*self.sizes.widths, self.sizes.filling)

    @property
    def segments(self) -> list[tuple[int, int]]:
        """Rows and width of every segment."""
        return list(zip(self.sizes.counts, self.sizes.widths, strict=True))

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sizes"}

    def to(self, device: torch.device) -> "Layout":
        """The same on a device."""
        moved = {name: to_device(tensor, device) for name, tensor in self.tensors().items()}
        return Layout(**moved, sizes=self.sizes)


class Current:
    """The layout of the pass in progress, where layers find it.

    Attributes:
        layout: None outside a pass.
        segment: the segment that the layer in progress sees; None where it sees all tokens.
        dropout: whether the adapter drops inputs of group 0.
    """

    layout: Layout | None = None
    segment: int | None = None
    dropout: bool = False

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
    """Ids and labels of encoded examples."""
    return [(row.input_ids, row.labels) for row in rows]


def padded_rows(batch: dict[str, Tensor]) -> list[Row]:
    """Ids and labels of the rows of a padded batch, on whichever side the padding is."""
    ids, labels, real = (batch[name].cpu().numpy() for name in ("input_ids", "labels", "attention_mask"))
    return [(i[m], y[m]) for i, y, m in zip(ids, labels, real.astype(bool), strict=True)]


def sizes(groups: Groups, *, rows: int | None = None, segments: int = SEGMENTS) -> Sizes:
    """What the rows need.

    Args:
        rows: at least as many as there are; empty ones are added.
    """
    lengths = [len(ids) for group in groups for ids, _ in group]
    count = len(lengths) if rows is None else rows
    ordered = sorted([0] * (count - len(lengths)) + lengths)
    ends = np.cumsum(Sizes(count, 0, (1,) * min(segments, count)).counts)
    return Sizes(count, sum(lengths), tuple(max(ordered[end - 1], 1) for end in ends))


def lay_out(groups: Groups, fill: Sizes | None = None) -> Layout:
    """Lay the rows of all groups end to end, group by group.

    Args:
        fill: at least what the rows need; empty rows, and tokens of a last row that belongs to no group, fill it up.
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


def _first_places(lengths: Any, size: Sizes) -> tuple[Any, Any]:
    """Where each row begins in the padded segments, and the rows in that order: shorter ones first."""
    begins, start = [], 0
    for count, width in zip(size.counts, size.widths, strict=True):
        begins.append(start + width * np.arange(count))
        start += count * width
    first = np.zeros(len(lengths), np.int64)
    order = np.argsort(lengths, kind="stable")
    first[order] = np.concatenate(begins)
    return first, order
