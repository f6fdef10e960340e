"""Keys and values of a fixed number of rows, each at its own length.

Row r holds its sequence from place 0 on, so that a token's place in the cache is its position. Places beyond a row's
position hold what an earlier occupant left, or nothing; the mask hides them until they are written.

Attention of one new token over the cache groups the heads that share a key instead of repeating the keys. With heads
h = (group of key head k, member m), softmax(q_km . K_k) V_k over members m is one attention call in which the members
are queries of one sequence: K and V are read once. transformers repeats them for every member wherever there is a mask,
which multiplies the memory traffic of a decode step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer


class SlotCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """Keys and values of `rows` sequences of up to `length` tokens, as a cache of transformers.

    Attention looks at `width` places; `positions`, (rows, 1), is where the next token of each row is written.
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
            for tensors, kind in ((self.keys, "keys"), (self.values, "values")):
                for like in (getattr(layer, kind) for layer in made.layers):
                    tensors.append(like.new_zeros((self.rows, like.shape[1], self.length, like.shape[3])))
        for at, layer in enumerate(made.layers):
            for mine, theirs in ((self.keys[at], layer.keys), (self.values[at], layer.values)):
                width = theirs.shape[2]
                source = (torch.arange(width, device=rows.device) + padding[:, None]).clamp(max=width - 1)
                mine[rows, :, :width] = theirs.gather(2, source[:, None, :, None].expand_as(theirs))
                mine[rows, :, width:] = 0  # a NaN that an earlier occupant left would get through the mask

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Write one token per row at its position; returns what attention may look at."""
        seen = []
        for mine, new in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
            mine.scatter_(2, self.positions[:, :, None, None].expand_as(new), new)
            seen.append(mine[:, :, : self.width])
        return tuple(seen)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Some models ask, although positions and mask are given; rows have no common length."""
        return 0


NAME = "holdfast_grouped"


def grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """An attention of transformers for queries of one token: (rows, heads, 1, width) to (rows, 1, heads, width)."""
    if query.shape[2] != 1 or any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "s_aux")):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out
    rows, heads, _, width = query.shape
    members = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    attended = scaled_dot_product_attention(members, key, value, attn_mask=attention_mask, scale=scaling)
    return attended.reshape(rows, 1, heads, value.shape[-1]), None


@contextmanager
def grouped(config: Any) -> Iterator[None]:
    """Run a model's attention through `grouped_attention`, where it runs torch's otherwise."""
    if config._attn_implementation != "sdpa":
        yield
        return
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, grouped_attention)
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"
