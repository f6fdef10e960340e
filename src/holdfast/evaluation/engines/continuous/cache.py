"""Keys and values of a fixed number of rows, each at its own length.

Row r holds its sequence from place 0 on, so that a token's place in the cache is its position. Places beyond a row's
position hold what an earlier occupant left, or nothing; the mask hides them until they are written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer


class SlotCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """Keys and values of `rows` sequences of up to `length` tokens, as a cache of transformers.

    Attributes:
        rows: rows in use, from the first on.
        width: places that attention looks at.
        positions: (rows, 1), where the next token of each row is written.
    """

    def __init__(self, rows: int, length: int, positions: Tensor) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.rows, self.length, self.width = rows, length, length
        self.positions = positions
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @property
    def dtype(self) -> torch.dtype:
        """Of the keys; known after the first `fill`."""
        return self.keys[0].dtype

    def fill(self, rows: Tensor, made: DynamicCache, padding: Tensor) -> None:
        """Take over left-padded sequences, one per row of `rows`, without their padding."""
        if not self.keys:
            self.keys = [self._empty(layer.keys) for layer in made.layers]
            self.values = [self._empty(layer.values) for layer in made.layers]
        for at, layer in enumerate(made.layers):
            for mine, theirs in ((self.keys[at], layer.keys), (self.values[at], layer.values)):
                width = theirs.shape[2]
                source = (torch.arange(width, device=rows.device) + padding[:, None]).clamp(max=width - 1)
                mine[rows, :, :width] = theirs.gather(2, source[:, None, :, None].expand_as(theirs))
                mine[rows, :, width:] = 0  # a NaN that an earlier occupant left would get through the mask

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Write one token per row at its position; returns what attention may look at."""
        found = []
        for mine, new in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
            rows = mine[: self.rows]
            rows.scatter_(2, self.positions[: self.rows, :, None, None].expand_as(new), new)
            found.append(rows[:, :, : self.width])
        return tuple(found)

    def keep(self, rows: Tensor) -> None:
        """Move these rows to the front and forget the others."""
        self.rows = len(rows)
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[: self.rows] = tensor[rows]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Some models ask, although positions and mask are given; rows have no common length."""
        return 0

    def _empty(self, like: Tensor) -> Tensor:
        _, heads, _, width = like.shape
        return torch.zeros((self.rows, heads, self.length, width), dtype=like.dtype, device=like.device)
