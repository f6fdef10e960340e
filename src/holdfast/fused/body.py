"""The layers of a model between token ids and last hidden states, run over packed rows, forward and backward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from holdfast.fused.grouped_lora import GroupedAdapter
from holdfast.fused.packed_rows import CURRENT, Groups, Layout, lay_out
from holdfast.fused.row_mixing import has_varlen, mixing_rows
from holdfast.scoring.completion import adapter_layers, adapters_off, evaluating, hidden_states
from holdfast.scoring.head import causal_lm

GradientOf = Callable[[Tensor], Tensor]
"""From hidden states (tokens, width) to the gradient of a loss by them."""


class Body:
    """A model's layers, with one gradient of the adapter for every group of rows.

    Args:
        adapter: the model's LoRA layers.
        mixers: its token mixers other than attention.
        precision: the autocast context of training.
    """

    def __init__(
        self,
        model: Any,
        adapter: GroupedAdapter,
        mixers: Sequence[nn.Module],
        *,
        device: torch.device,
        precision: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.model, self.adapter, self.device, self.precision = model, adapter, device, precision
        self._mixers = list(mixers)
        self._config = causal_lm(model).config.get_text_config()
        self._adapter_layers = adapter_layers(model)
        self.modules = list(model.modules())
        self._checkpointed = [m for m in self.modules if getattr(m, "gradient_checkpointing", False)]

    @property
    def checkpointed(self) -> bool:
        """Whether layers are run again in the backward."""
        return bool(self._checkpointed)

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
        with evaluating(self.model, self.modules), layers, self.adapter.installed(), self.without_reentry():
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
        before = [(module, vars(module)[name]) for module in self._checkpointed if vars(module).get(name) is not None]
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
    def states(self, groups: Groups, *, adapters: bool = True) -> Tensor:
        """Hidden states of all rows, laid end to end."""
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
