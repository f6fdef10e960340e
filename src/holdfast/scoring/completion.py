"""Per-example losses of the completion tokens, the same in the reference pass, in training and in audits.

Three rules keep `loss_now - loss_reference` free of artefacts: the head and the log-softmax run in float32, dropout is
off, and each example's sum is taken in float64 so that padding and batch composition do not matter.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from holdfast.core.errors import UnsupportedError
from holdfast.core.library_types import AdapterLayer, LanguageModel
from holdfast.data.encode import Encoded, collate
from holdfast.scoring.head import Head, causal_lm, token_kl, token_nll
from holdfast.scoring.transfer import to_device

IGNORE = -100
HEAD_TOLERANCE = 2e-3  # nats per token between our head and the model's own, both in float32


@dataclass(frozen=True)
class CompletionLosses:
    """Negative log-likelihood, or KL, of each row's completion: over all its tokens and over its first k."""

    total: Tensor  # sum over the completion's tokens
    tokens: Tensor  # how many
    first: Tensor  # sum over the first k tokens
    first_tokens: Tensor  # how many (k, or fewer for a shorter completion)

    def per_token(self) -> Tensor:
        return self.total / self.tokens

    def per_first_token(self) -> Tensor:
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

    `model.eval()` would also switch off checkpointing, which transformers ties to the layer's own `training` flag. So
    checkpointed layers keep that flag until what is checkpointed begins, where some (XGLM, BioGPT) read it for a
    dropout of their own; everything inside them is in eval mode. `modules` are the model's, for callers that come
    often: walking through it takes milliseconds.
    """
    training = [module for module in (model.modules() if modules is None else modules) if module.training]
    checkpointed: list[Any] = [
        m for m in training if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing
    ]
    functions = [layer._gradient_checkpointing_func for layer in checkpointed]
    try:
        for module in training:
            module.training = False
        for layer, function in zip(checkpointed, functions, strict=True):
            layer.training = True
            layer._gradient_checkpointing_func = partial(_evaluated, layer, function)
        yield
    finally:
        for layer, function in zip(checkpointed, functions, strict=True):
            layer._gradient_checkpointing_func = function
        for module in training:
            module.training = True


def _evaluated(layer: nn.Module, checkpoint: Callable[..., Any], forward: Callable[..., Any], *args: Any) -> Any:
    """Checkpoint a layer's forward in eval mode, in its first run and when it is run again.

    Before transformers 5.23 `forward` is the layer's call with its hooks, since then its forward alone.
    """

    def without_dropout(*inputs: Any) -> Any:
        before, layer.training = layer.training, False
        try:
            return forward(*inputs)
        finally:  # also by an exception: a second run that has enough stops by one
            layer.training = before

    return checkpoint(without_dropout, *args)


def adapter_layers(model: nn.Module) -> list[AdapterLayer]:
    """PEFT's layers, each of which can leave its adapter out."""
    return [module for module in model.modules() if hasattr(module, "_disable_adapters")]


@contextmanager
def adapters_off(model: nn.Module, layers: list[AdapterLayer] | None = None) -> Iterator[None]:
    """Run the base model without its adapters, touching neither `requires_grad` nor the active adapter.

    `layers` are the model's `adapter_layers`, for callers that switch often: looking them up takes milliseconds.
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


def hidden_states(model: LanguageModel, batch: Mapping[str, Tensor]) -> Tensor:
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
        # No position: the model's own head is not needed; on one position a row it costs half as much as the layers.
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


@dataclass(frozen=True)
class Batch:
    """A right-padded batch and its scored tokens."""

    inputs: dict[str, Tensor]  # `input_ids` and, where it says anything, `attention_mask`, of shape (rows, width)
    at: Tensor  # for every scored token, the flat position (row * width + position) that predicts it
    targets: Tensor  # the scored tokens
    early: Tensor  # 1.0 where the token is among its completion's first k, else 0.0

    @classmethod
    def located(cls, tensors: Mapping[str, Tensor], first_k: int) -> Self:
        """From padded tensors, `labels` among them."""
        following = tensors["labels"].roll(-1, dims=1)
        following[:, -1] = IGNORE
        scored = following != IGNORE
        at = scored.flatten().nonzero().squeeze(1)
        early = (scored.cumsum(1) <= first_k).flatten()[at].double()
        inputs = {name: tensor for name, tensor in tensors.items() if name != "labels"}
        return cls(inputs, at, following.flatten()[at], early)

    @classmethod
    def of(
        cls, rows: Sequence[Encoded], *, pad_token_id: int, first_k: int, device: torch.device, masked: bool = True,
        width: int | None = None,
    ) -> Self:  # fmt: skip
        """Pad to the longest row (to a multiple of `width`), find the scored tokens, and send both to the device.

        Which tokens count is worked out on the host: no step waits for the device. A mask of ones is left out: no mask
        means the same, and a model waits for the device to find that out.
        """
        tensors = collate(rows, pad_token_id, width)
        if not masked or bool(tensors["attention_mask"].all()):
            del tensors["attention_mask"]
        host = cls.located(tensors, first_k)
        inputs = {name: to_device(tensor, device) for name, tensor in host.inputs.items()}
        return cls(inputs, *(to_device(tensor, device) for tensor in (host.at, host.targets, host.early)))

    def per_example(self, values: Tensor) -> Tensor:
        """Sum (..., scored tokens) to (..., rows), in float64 so that padding does not matter."""
        rows, width = self.inputs["input_ids"].shape
        cells = torch.zeros(*values.shape[:-1], rows * width, dtype=torch.float64, device=values.device)
        return cells.index_copy_(-1, self.at, values.double()).view(*values.shape[:-1], rows, width).sum(-1)


@dataclass(frozen=True)
class States:
    """The hidden states that predict a batch's scored tokens, and the head that reads them."""

    hidden: Tensor
    head: Head

    @classmethod
    def of(cls, model: LanguageModel, batch: Batch) -> Self:
        """Run the model; its own head is left out."""
        hidden = hidden_states(model, batch.inputs)
        return cls(hidden.flatten(0, 1).index_select(0, batch.at), Head(model))

    def log_probabilities(self, piece: slice) -> Tensor:
        """Of a piece of the tokens, float32."""
        return self.head.log_probabilities(self.hidden[piece])


def losses_of(model: LanguageModel, batch: Batch) -> Tensor:
    """Rows `total` and `first` (summed NLL of the completion and of its first k tokens), one column an example."""
    states = States.of(model, batch)
    nll = token_nll(states.head, states.hidden, batch.targets)
    return batch.per_example(torch.stack([nll, nll * batch.early]))


Reference = States | Callable[[], AbstractContextManager[Any]] | None
"""pi_0 on a batch: its states; or what makes a context in which the model is pi_0; None switches the adapters off."""


def kl_of(model: LanguageModel, batch: Batch, reference: Reference = None) -> Tensor:
    """Rows `total` and `first` as of `losses_of`, of `KL(pi_0 || pi_theta)`."""
    if not isinstance(reference, States):
        with torch.no_grad(), adapters_off(model) if reference is None else reference():
            reference = States.of(model, batch)  # a trained copy of the head (modules_to_save) is part of the adapter
            reference.head.keep()
    states = States.of(model, batch)
    kl = token_kl(states.head, states.hidden, reference.head, reference.hidden)
    return batch.per_example(torch.stack([kl, kl * batch.early]))


def completion_losses(model: LanguageModel, batch: Mapping[str, Tensor], first_k: int) -> CompletionLosses:
    """Losses of every row of right-padded tensors (`input_ids`, `attention_mask`, `labels`)."""
    located = Batch.located(batch, first_k)
    return _of_rows(losses_of(model, located), located, first_k)


def completion_kl(
    model: LanguageModel, batch: Mapping[str, Tensor], first_k: int, reference: Reference = None
) -> CompletionLosses:
    """The same of `KL(pi_0 || pi_theta)` in place of the NLL; see `kl_of`."""
    located = Batch.located(batch, first_k)
    return _of_rows(kl_of(model, located, reference), located, first_k)


def _of_rows(sums: Tensor, located: Batch, first_k: int) -> CompletionLosses:
    tokens = located.per_example(torch.ones_like(located.early))
    return CompletionLosses(sums[0], tokens, sums[1], tokens.clamp(max=first_k))


@torch.no_grad()
def require_understood_head(model: LanguageModel, batch: Mapping[str, Tensor]) -> Tensor:
    """Refuse a model whose logits are not `head(hidden)`: our losses would not be its losses.

    Compares one row with the logits that the model itself returns, and returns that row's mean loss.
    """
    row = {name: tensor[:1] for name, tensor in batch.items()}
    labels = row["labels"][:, 1:]
    mask = labels != IGNORE
    inner = causal_lm(model)
    ours = completion_losses(model, row, first_k=1).per_token()
    logits = model(input_ids=row["input_ids"], attention_mask=row["attention_mask"], use_cache=False).logits
    theirs = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    gap = float((ours + (theirs * mask).sum(1) / mask.sum(1)).abs())
    # The model's own logits are rounded to its dtype; the comparison looks for a wrong formula, not for rounding.
    exact = logits.dtype == next(inner.parameters()).dtype == torch.float32
    tolerance = HEAD_TOLERANCE if exact else 0.1
    if not gap <= tolerance:
        raise UnsupportedError(
            f"token losses computed from the hidden states of {type(inner).__name__} differ from its own logits by "
            f"{gap:.3g} nats per token",
            remedy="report this architecture; its head does more than a linear map, scaling and soft cap",
        )
    return ours
