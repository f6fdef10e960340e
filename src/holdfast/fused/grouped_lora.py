"""Several LoRA gradients from one backward: each group of tokens has its own.

A LoRA layer is `y = W x + s B A x`. Tokens of different rows meet only in the sums that make the weight gradients,

    dB = s sum_t dy_t (A x_t)^T        dA = s sum_t (B^T dy_t) x_t^T,

so a backward over the rows of several losses gives every loss's gradient when these sums are taken group by group. With
`m_tg` = 1 where token t belongs to group g, the sums of all groups are one product with the r-wide side spread over
`r x groups` columns, which costs next to nothing beside W.

Group 0 writes to the parameters themselves; group g > 0 to leaves that share their storage, so that an optimizer's step
moves both.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from holdfast.fused.packed_rows import CURRENT
from holdfast.models.lora_layers import LoraLayer


class GroupedLora(torch.autograd.Function):
    """`base + s B A x` over flat tokens, whose gradients of A and B are one per group.

    `weights` are A and B of group 0, of group 1 and so on; all share one storage, and the forward reads the first two.
    """

    @staticmethod
    def forward(ctx: Any, base: Tensor, x: Tensor, scaling: float, membership: Tensor, *weights: Tensor) -> Tensor:
        """(tokens, d_out) from `base` (tokens, d_out), `x` (tokens, d_in) and `membership` (tokens, groups)."""
        dtype = _product_dtype(x, weights[0])
        with torch.autocast(x.device.type, enabled=False):
            x_, a, b = x.to(dtype), weights[0].to(dtype), weights[1].to(dtype)
            h = x_ @ a.t()
            if base.dtype == dtype:
                y = torch.addmm(base, h, b.t(), alpha=scaling)
            else:
                y = (base + (h @ b.t()) * scaling).to(base.dtype)
        ctx.save_for_backward(x_, h, a, b, membership)
        ctx.scaling, ctx.weight_dtype, ctx.x_dtype = scaling, weights[0].dtype, x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of base and x, and of A and B for every group."""
        x, h, a, b, membership = ctx.saved_tensors
        groups, rank = membership.shape[1], len(a)
        d = dy.to(h.dtype)
        dh = (d @ b) * ctx.scaling
        db = (d.t() @ _spread(h, membership)) * ctx.scaling  # d_out, groups x r
        da = _spread(dh, membership).t() @ x  # groups x r, d_in
        dx = (dh @ a).to(ctx.x_dtype) if ctx.needs_input_grad[1] else None
        found: list[Tensor | None] = [dy, dx, None, None]
        for g in range(groups):
            part = slice(g * rank, (g + 1) * rank)
            found += [da[part].to(ctx.weight_dtype), db[:, part].to(ctx.weight_dtype).contiguous()]
        return tuple(found)


def _spread(narrow: Tensor, membership: Tensor) -> Tensor:
    """(tokens, r) to (tokens, groups x r): a token's numbers in the columns of its group, zero in the others."""
    return (membership.to(narrow.dtype).unsqueeze(2) * narrow.unsqueeze(1)).flatten(1)


def _product_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """In which PEFT multiplies: autocast's dtype, or the adapter's own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


class GroupedAdapter:
    """The LoRA layers of a model, with a leaf for every further of `count` groups; one is ordinary training."""

    def __init__(self, layers: Sequence[LoraLayer], count: int) -> None:
        self.layers, self.count = list(layers), count
        self.parameters: list[nn.Parameter] = []  # A and B of every layer, as of the last `refresh`
        self._leaves: list[tuple[Tensor, ...]] = []
        self._forwards: list[Any] = []
        self._made_for: list[tuple[int, int]] = []
        self.refresh()

    @property
    def dropout(self) -> float:
        return max(rate(layer) for layer in self.layers)

    def leaves(self, group: int) -> list[Tensor]:
        """The leaves that collect a group's gradient, in the order of `parameters`."""
        return [leaf for leaves in self._leaves for leaf in leaves[2 * group : 2 * group + 2]]

    def refresh(self) -> bool:
        """Make the leaves anew where a parameter has got other storage (loading, casting); whether that was so."""
        parameters = [p for layer in self.layers for p in (layer.A, layer.B)]
        current = [(id(p), p.data_ptr()) for p in parameters]
        if current == self._made_for:
            return False
        self._made_for, self.parameters = current, parameters
        self._leaves = []
        for layer in self.layers:
            further = [w.detach().requires_grad_() for _ in range(1, self.count) for w in (layer.A, layer.B)]
            self._leaves.append((layer.A, layer.B, *further))
        self._forwards = [self._forward(layer, leaves) for layer, leaves in zip(self.layers, self._leaves, strict=True)]
        return True

    @contextmanager
    def installed(self) -> Iterator[None]:
        """A context in which the layers compute grouped gradients; it must enclose the backward (checkpointing)."""
        try:
            for layer, forward in zip(self.layers, self._forwards, strict=True):
                layer.module.__dict__["forward"] = forward
            yield
        finally:
            for layer in self.layers:
                layer.module.__dict__.pop("forward", None)

    def _forward(self, layer: LoraLayer, leaves: tuple[Tensor, ...]) -> Any:
        module, scaling = layer.module, layer.scaling
        p = rate(layer)

        def forward(x: Tensor, *args: object, **kwargs: object) -> Tensor:
            base: Tensor = module.base_layer(x, *args, **kwargs)
            if module.disable_adapters:
                return base
            membership = CURRENT.membership
            # Passes that measure (constraints, and what packing changes) are without.
            seen = _dropped(x, p, membership) if p > 0.0 and CURRENT.dropout else x
            y: Tensor = GroupedLora.apply(  # type: ignore[no-untyped-call]
                base.flatten(0, -2), seen.flatten(0, -2), scaling, membership, *leaves
            )
            return y.view(base.shape)

        return forward


def rate(layer: LoraLayer) -> float:
    return float(getattr(layer.module.lora_dropout[layer.adapter], "p", 0.0))


def _dropped(x: Tensor, p: float, membership: Tensor) -> Tensor:
    """Dropout on the tokens of group 0, the task's, alone: a constraint is measured without."""
    task = membership[:, 0].bool().view(*x.shape[:-1], 1)
    return torch.where(task, nn.functional.dropout(x, p, training=True), x)
