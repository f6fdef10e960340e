"""Per-example losses of the completion tokens, the same in the reference pass and in training.

Three rules keep `loss_now - loss_reference` free of artefacts: the head and the log-softmax run in float32, dropout is
off, and each example's sum is taken in float64 so that padding and batch composition do not matter.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.modeling_layers import GradientCheckpointingLayer

from holdfast.core.errors import UnsupportedError
from holdfast.scoring.head import TOKEN_CHUNK, Head, causal_lm, token_kl, token_nll

__all__ = [
    "IGNORE",
    "TOKEN_CHUNK",
    "CompletionLosses",
    "Head",
    "adapter_layers",
    "adapters_off",
    "causal_lm",
    "completion_kl",
    "completion_losses",
    "deterministic",
    "evaluating",
    "hidden_states",
    "require_understood_head",
]

IGNORE = -100
HEAD_TOLERANCE = 2e-3  # nats per token between our head and the model's own, both in float32


@dataclass(frozen=True)
class CompletionLosses:
    """Negative log-likelihood of each row's completion: over all its tokens and over its first k.

    Attributes:
        total: sum over the completion's tokens.
        tokens: how many.
        first: sum over the first k tokens.
        first_tokens: how many (k, or fewer for a shorter completion).
    """

    total: Tensor
    tokens: Tensor
    first: Tensor
    first_tokens: Tensor

    def per_token(self) -> Tensor:
        """Mean over the completion."""
        return self.total / self.tokens

    def per_first_token(self) -> Tensor:
        """Mean over the first k tokens."""
        return self.first / self.first_tokens


@contextmanager
def deterministic(model: nn.Module) -> Iterator[None]:
    """Switch off dropout and every other train-time randomness, checkpointing kept; the random state is restored."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices), evaluating(model):
        yield


@contextmanager
def evaluating(model: nn.Module, modules: Sequence[nn.Module] | None = None) -> Iterator[None]:
    """Every module in eval mode, gradient checkpointing kept.

    `model.eval()` would also switch off checkpointing, which transformers ties to the layer's own `training` flag; so
    checkpointed layers keep that flag until their forward begins, where some (XGLM, BioGPT) read it for a dropout of
    their own; everything inside them is in eval mode.

    Args:
        modules: the model's, for callers that come often; walking through it takes milliseconds.
    """
    training = [module for module in (model.modules() if modules is None else modules) if module.training]
    checkpointed = [m for m in training if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]
    handles: list[RemovableHandle] = []
    try:
        for module in training:
            module.training = False
        for layer in checkpointed:
            layer.training = True
            handles.append(layer.register_forward_pre_hook(_evaluated))
            handles.append(layer.register_forward_hook(_trained, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in training:
            module.training = True


def _evaluated(layer: nn.Module, _: Any) -> None:
    """At the start of a checkpointed layer's forward: no dropout."""
    layer.training = False


def _trained(layer: nn.Module, _: Any, __: Any) -> None:
    """At its end, also by an exception (a recomputation that has enough stops by one): the flag as it was."""
    layer.training = True


def adapter_layers(model: nn.Module) -> list[Any]:
    """PEFT's layers, each of which can leave its adapter out."""
    return [module for module in model.modules() if hasattr(module, "_disable_adapters")]


@contextmanager
def adapters_off(model: nn.Module, layers: list[Any] | None = None) -> Iterator[None]:
    """Run the base model without its adapters, touching neither `requires_grad` nor the active adapter.

    Args:
        layers: the model's `adapter_layers`, for callers that switch often; looking them up takes milliseconds.
    """
    layers = adapter_layers(model) if layers is None else layers
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer._disable_adapters = value


def hidden_states(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Last hidden states (rows, positions, width), through the model's own forward.

    Without an `attention_mask` in the batch every position counts as text (see `holdfast.auditing.scoring`).

    The backbone's output is caught by a hook instead of calling the backbone, since sharding and autocast are attached
    to the outermost forward.
    """
    inner = causal_lm(model)
    caught: list[Tensor] = []
    handle = inner.base_model.register_forward_hook(lambda _m, _a, out: caught.append(out[0]))
    arguments: dict[str, Any] = {"use_cache": False}
    if "position_ids" in batch:  # packed rows
        arguments["position_ids"] = batch["position_ids"]
    if "logits_to_keep" in inspect.signature(inner.forward).parameters:
        # No position: the model's own head is not needed, and on one position per row it costs as much as half the
        # layers.
        arguments["logits_to_keep"] = torch.empty(0, dtype=torch.long, device=batch["input_ids"].device)
    try:
        model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask"), **arguments)
    finally:
        handle.remove()
    if not caught:
        raise UnsupportedError(
            f"the forward of this {type(inner).__name__} does not run its own layers (a copy of a model that a TRL "
            "trainer has patched still runs the original)",
            remedy="load the model afresh, or remove the patch with `model.__dict__.pop('forward', None)`",
        )
    return caught[-1]


def _scored(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Next-token labels (rows, positions - 1) and the mask of those that count."""
    labels = batch["labels"][:, 1:]
    return labels, labels != IGNORE


def _per_row(values: Tensor, mask: Tensor) -> Tensor:
    """Scatter one value per scored token back to (rows, positions - 1) in float64; zero elsewhere."""
    return torch.zeros(mask.shape, dtype=torch.float64, device=mask.device).masked_scatter(mask, values.double())


def completion_losses(model: Any, batch: Mapping[str, Tensor], first_k: int) -> CompletionLosses:
    """Losses of every row of a right-padded batch (`input_ids`, `attention_mask`, `labels`)."""
    labels, mask = _scored(batch)
    hidden = hidden_states(model, batch)[:, :-1]
    nll = _per_row(token_nll(Head(model), hidden[mask], labels[mask]), mask)
    early = mask & (mask.cumsum(1) <= first_k)
    return CompletionLosses(nll.sum(1), mask.sum(1), (nll * early).sum(1), early.sum(1))


def completion_kl(
    model: Any, batch: Mapping[str, Tensor], reference_model: Callable[[], AbstractContextManager[Any]] | None = None
) -> Tensor:
    """Mean over the completion of `KL(pi_0 || pi_theta)` per token.

    Args:
        reference_model: makes a context in which the model is pi_0; None switches its adapters off.
    """
    _, mask = _scored(batch)
    with torch.no_grad(), adapters_off(model) if reference_model is None else reference_model():
        reference = hidden_states(model, batch)[:, :-1][mask]
        head_0 = Head(model)  # a trained copy of the head (modules_to_save) is part of the adapter
        head_0.keep()
    hidden = hidden_states(model, batch)[:, :-1][mask]
    return _per_row(token_kl(Head(model), hidden, head_0, reference), mask).sum(1) / mask.sum(1)


@torch.no_grad()
def require_understood_head(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Refuse a model whose logits are not `head(hidden)`: our losses would not be its losses.

    Compares one row with the logits that the model itself returns, and returns that row's mean loss.
    """
    row = {name: tensor[:1] for name, tensor in batch.items()}
    labels, mask = _scored(row)
    inner = causal_lm(model)
    ours = completion_losses(model, row, first_k=1).per_token()
    logits = model(input_ids=row["input_ids"], attention_mask=row["attention_mask"], use_cache=False).logits
    theirs = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    gap = float((ours + (theirs * mask).sum(1) / mask.sum(1)).abs())
    # The model's own logits are rounded to its dtype; the comparison looks for a wrong formula, not for rounding.
    tolerance = (
        HEAD_TOLERANCE if logits.dtype == torch.float32 and next(inner.parameters()).dtype == torch.float32 else 0.1
    )
    if not gap <= tolerance:
        raise UnsupportedError(
            f"token losses computed from the hidden states of {type(inner).__name__} differ from its own logits by "
            f"{gap:.3g} nats per token",
            remedy="report this architecture; its head does more than a linear map, scaling and soft cap",
        )
    return ours
