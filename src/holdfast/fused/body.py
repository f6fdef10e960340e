"""The layers of a model between token ids and last hidden states, run over packed rows, forward and backward.

Where tokens of packed rows meet, each row is by itself:

* Attention runs over the rows' boundaries where the GPU has a kernel for that (`torch.nn.attention.varlen`), otherwise
  over a padded copy of queries, keys and values. Rows are padded on the right and attention is causal, so no real token
  sees a padded one and no mask is needed.
* Linear attention, state-space and convolutional mixers run over a padded copy of their input, for the same reason.
  The gated delta rule, where no kernel is installed for it, keeps and reads less memory here (`delta_rule`).
Everything else of a model works on single tokens and never sees padding.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from holdfast.core.errors import UnsupportedError
from holdfast.core.library_types import LanguageModel, ModelConfig
from holdfast.fused.delta_rule import computed_here
from holdfast.fused.grouped_lora import GroupedAdapter
from holdfast.fused.packed_rows import CURRENT, Groups, Layout, lay_out
from holdfast.scoring.completion import adapter_layers, adapters_off, evaluating, hidden_states
from holdfast.scoring.head import causal_lm

NAME = "holdfast_rows"
VARLEN_DTYPES = (torch.bfloat16, torch.float16)
VARLEN_HEAD = 256

GradientOf = Callable[[Tensor], Tensor]
"""From hidden states (tokens, width) to the gradient of a loss by them."""


class Body:
    """A model's layers, with one gradient of the adapter for every group of rows.

    `mixers` are its token mixers other than attention, `precision` the autocast context of training.
    """

    def __init__(
        self, model: LanguageModel, adapter: GroupedAdapter, mixers: Sequence[nn.Module], *, device: torch.device,
        precision: Callable[[], AbstractContextManager[object]],
    ) -> None:  # fmt: skip
        self.model, self.adapter, self.device, self.precision = model, adapter, device, precision
        self._mixers = list(mixers)
        self._config = causal_lm(model).config.get_text_config()
        self._adapter_layers = adapter_layers(model)
        self.modules = list(model.modules())
        self.checkpointed = [m for m in self.modules if getattr(m, "gradient_checkpointing", False)]

    @property
    def training(self) -> bool:
        """Whether every module is in training mode, in which alone layers are checkpointed."""
        return all(module.training for module in self.modules)

    @cached_property
    def pads(self) -> bool:
        """Whether rows are padded where tokens meet: other mixers than attention, or no kernel for packed rows."""
        config = self._config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        like = torch.empty(0, 1, width, device=self.device, dtype=self.dtype)
        return bool(self._mixers) or not has_varlen(like)

    @property
    def width(self) -> int:
        return int(self._config.hidden_size)

    @cached_property
    def dtype(self) -> torch.dtype:
        """In which products are computed: autocast's, or the model's own."""
        kind = self.device.type
        with self.precision():
            if torch.is_autocast_enabled(kind):
                return torch.get_autocast_dtype(kind)
        found: torch.dtype = causal_lm(self.model).dtype
        return found

    @contextmanager
    def running(self) -> Iterator[None]:
        """Everything that makes the model's forward keep to packed rows; must enclose forward and backward."""
        layers = mixing_rows(self._config, self._mixers)
        with self.without_reentry(), evaluating(self.model, self.modules), layers, self.adapter.installed():
            try:
                yield
            finally:
                CURRENT.layout, CURRENT.dropout = None, False

    def forward(self, layout: Layout, *, adapters: bool = True, dropout: bool = False) -> Tensor:
        """Hidden states (tokens, width).

        The adapter's dropout is for the tokens of group 0; constraints and references are measured without.
        """
        CURRENT.layout, CURRENT.dropout = layout, dropout
        batch = {"input_ids": layout.input_ids, "position_ids": layout.position_ids}
        off: AbstractContextManager[Any] = nullcontext() if adapters else adapters_off(self.model, self._adapter_layers)
        with self.precision(), off:
            return hidden_states(self.model, batch)[0]

    def backward(self, hidden: Tensor, gradient: Tensor) -> list[list[Tensor]]:
        """For every group the gradients of the adapter's parameters, in their order."""
        groups, each = self.adapter.count, len(self.adapter.parameters)
        found = torch.autograd.grad(hidden, [leaf for g in range(groups) for leaf in self.adapter.leaves(g)], gradient)
        return [list(found[g * each : (g + 1) * each]) for g in range(groups)]

    @contextmanager
    def without_reentry(self) -> Iterator[None]:
        """Checkpoint without re-entering autograd: re-entrant checkpoints give no gradients on request.

        The random state is kept for the second run only where there is dropout, since reading it cannot be recorded.
        """
        function = partial(checkpoint, use_reentrant=False, preserve_rng_state=self.adapter.dropout > 0)
        name = "_gradient_checkpointing_func"
        before = [(module, vars(module)[name]) for module in self.checkpointed if vars(module).get(name) is not None]
        try:
            for module, _ in before:
                setattr(module, name, function)
            yield
        finally:
            for module, given in before:
                setattr(module, name, given)


class EagerPasses:
    """Passes whose kernels are launched one by one."""

    def __init__(self, body: Body) -> None:
        self.body = body

    @torch.no_grad()
    def states(self, groups: Groups, *, adapters: bool = True, once: bool = False) -> Tensor:
        """Hidden states of all rows, laid end to end; `once` says that no other pass will have this size."""
        layout = lay_out(groups).to(self.body.device)
        self.body.adapter.refresh()
        with self.body.running():
            return self.body.forward(layout, adapters=adapters)

    def gradients(self, groups: Groups, gradient_of: GradientOf, *, dropout: bool = True) -> list[list[Tensor]]:
        """Forward, the loss's gradient by the hidden states, backward: every group's gradient."""
        layout = lay_out(groups).to(self.body.device)
        self.body.adapter.refresh()
        with self.body.running():
            hidden = self.body.forward(layout, dropout=dropout)
            return self.body.backward(hidden, gradient_of(hidden.detach()))


def row_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
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


def has_varlen(query: Tensor) -> bool:
    """Whether torch has a kernel for rows of different lengths: flash attention on recent GPUs."""
    return (
        query.is_cuda
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
def mixing_rows(config: ModelConfig, mixers: Sequence[nn.Module]) -> Iterator[None]:
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
