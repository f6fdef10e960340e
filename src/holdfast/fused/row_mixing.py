"""Where tokens of packed rows meet: attention and other token mixers, each row by itself.

* Attention runs over the rows' boundaries where the GPU has a kernel for that (`torch.nn.attention.varlen`), otherwise
  over a padded copy of queries, keys and values. Rows are padded on the right and attention is causal, so no real token
  sees a padded one and no mask is needed.
* Linear attention, state-space and convolutional mixers run over a padded copy of their input, for the same reason.
  The gated delta rule, where no kernel is installed for it, keeps and reads less memory here (`delta_rule`).
Everything else of a model works on single tokens and never sees padding.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from holdfast.core.errors import UnsupportedError
from holdfast.fused.delta_rule import computed_here
from holdfast.fused.packed_rows import CURRENT, Layout

NAME = "holdfast_rows"
VARLEN_DTYPES = (torch.bfloat16, torch.float16)
VARLEN_HEAD = 256


def row_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention of transformers over packed rows: (1, heads, tokens, width) to (1, tokens, heads, width)."""
    rows = CURRENT.rows
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"attention with {name} over packed rows", remedy="set step: two_pass")
    window = kwargs.get("sliding_window")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # tokens, heads, width
    if has_varlen(q):
        return _varlen(q, k, v, rows, scaling, window).unsqueeze(0), None
    shared = q.shape[1] != k.shape[1]
    outs = []
    for parts in zip(*(padded(x, rows) for x in (q, k, v)), strict=True):
        q, k, v = (x.transpose(1, 2) for x in parts)  # rows, heads, longest, width
        near = None if window is None or window >= q.shape[2] else _near(q.shape[2], window, q.device)
        out = scaled_dot_product_attention(q, k, v, near, is_causal=near is None, scale=scaling, enable_gqa=shared)
        outs.append(out.transpose(1, 2))
    return flat(outs, rows).unsqueeze(0), None


def _near(length: int, window: int, device: torch.device) -> Tensor:
    """(length, length): which positions a causal window holds, the query's own included."""
    at = torch.arange(length, device=device)
    back = at[:, None] - at[None, :]
    return (back >= 0) & (back < window)


def _varlen(q: Tensor, k: Tensor, v: Tensor, rows: Layout, scaling: float | None, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    back = -1 if window is None or window >= rows.longest else window - 1  # beside the query's own position
    more: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]} if _names_grouped_heads() else {}
    out = varlen_attn(
        q, k, v, rows.boundaries, rows.boundaries, rows.longest, rows.longest, scale=scaling, window_size=(back, 0),
        **more,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


@cache
def _names_grouped_heads() -> bool:
    """Whether this torch wants to be told that heads share keys; the kernel of 2.11 does so untold."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


@cache
def _varlen_available() -> bool:
    """Whether torch has variable-length attention with a causal window, as 2.11 has."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "window_size" in inspect.signature(varlen_attn).parameters


def has_varlen(query: Tensor) -> bool:
    """Whether torch has a kernel for rows of different lengths: flash attention on recent GPUs."""
    return (
        query.is_cuda
        and _varlen_available()
        and query.dtype in VARLEN_DTYPES
        and query.shape[-1] <= VARLEN_HEAD
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def padded(x: Tensor, rows: Layout) -> list[Tensor]:
    """(tokens, ...) to the padded segments, each (rows, longest, ...)."""
    parts = torch.split(x.index_select(0, rows.spread), [count * width for count, width in rows.segments])
    return [part.view(*shape, *x.shape[1:]) for part, shape in zip(parts, rows.segments, strict=True)]


def flat(segments: Sequence[Tensor], rows: Layout) -> Tensor:
    """The padded segments to (tokens, ...)."""
    return torch.cat([segment.flatten(0, 1) for segment in segments]).index_select(0, rows.gather)


@contextmanager
def mixing_rows(config: Any, mixers: Sequence[nn.Module]) -> Iterator[None]:
    """A context in which a model's attention keeps to the rows of `CURRENT`, and so do its other mixers.

    It must enclose the backward too: gradient checkpointing runs the layers again there. `config`, the text model's,
    names its attention; `mixers` are the token mixers that are not attention.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, row_attention)
    before = config._attn_implementation
    own = [mixer.__dict__.get("forward") for mixer in mixers]
    try:
        config._attn_implementation = NAME
        for mixer in mixers:
            mixer.__dict__["forward"] = _by_row(mixer.forward)
        with computed_here(mixers):
            yield
    finally:
        config._attn_implementation = before
        for mixer, forward in zip(mixers, own, strict=True):
            mixer.__dict__.pop("forward", None)
            if forward is not None:
                mixer.__dict__["forward"] = forward


def _by_row(inner: Any) -> Any:
    """A mixer's forward over the padded segments."""

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows, found = CURRENT.rows, []
        try:
            for CURRENT.segment, part in enumerate(padded(hidden_states[0], rows)):
                found.append(inner(part, *args, **kwargs))
        finally:
            CURRENT.segment = None
        if isinstance(found[0], Tensor):
            return flat(found, rows).unsqueeze(0)
        return (flat([one[0] for one in found], rows).unsqueeze(0), *found[0][1:])

    return forward
