"""Attention of one new token over a cache, with the heads that share a key grouped instead of the keys repeated.

With heads h = (group of key head k, member m), softmax(q_km . K_k) V_k over members m is one attention call in which
the members are queries of one sequence: K and V are read once. transformers repeats them for every member wherever
there is a mask, which multiplies the memory traffic of a decode step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NAME = "holdfast_grouped"


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention of transformers for queries of one token: (rows, heads, 1, width) to (rows, 1, heads, width)."""
    if query.shape[2] != 1 or any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "s_aux")):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return found
    rows, heads, _, width = query.shape
    members = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    out = scaled_dot_product_attention(members, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(rows, 1, heads, value.shape[-1]), None


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
