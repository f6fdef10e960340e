"""The language-model head: float32 log-probabilities, token losses and their gradients, a few tokens at a time.

    NLL_t = -log p(y_t)                 d NLL_t / d logits = p - onehot(y_t)
    KL_t  = sum_v p_0 (log p_0 - log p)   d KL_t / d logits = p - p_0

The logits of a batch are larger than everything else, so they exist for `TOKEN_CHUNK` tokens at one time. Where the
head is frozen (`FusedTokenLoss`) a chunk's loss and its gradient with respect to the hidden states are computed
together; only the latter is kept, and the backward multiplies it by the incoming number of each token. A trained head
needs its own gradient: its logits are computed again in the backward.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from holdfast.core.errors import UnsupportedError
from holdfast.core.library_types import LanguageModel, ModelConfig

TOKEN_CHUNK = 512  # completion tokens whose logits exist at one time
VOCABULARY_BLOCK = 16_384  # rows of a head in another dtype that are converted to float32 at one time

Value = Callable[[Tensor, Tensor], Tensor]
ValueAndGradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def causal_lm(model: LanguageModel) -> LanguageModel:
    """The transformers model inside PEFT's and DDP's wrappers, where there are any."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class Head:
    """The language-model head in float32, with the model's logit scaling and soft cap."""

    def __init__(self, model: LanguageModel) -> None:
        inner = causal_lm(model)
        layer = inner.get_output_embeddings()
        if layer is None or not hasattr(layer, "weight"):
            what = f"{type(inner).__name__} has no output embedding to compute token losses from"
            raise UnsupportedError(what, remedy="use a causal language model (AutoModelForCausalLM)")
        # A tuner's layer around the head; a wrapper with a copy of it (modules_to_save) has that copy's weight.
        if hasattr(layer, "get_base_layer") and not hasattr(layer, "original_module"):
            what = "an adapter on the output head: losses come from the head's weight, which does not include it"
            raise UnsupportedError(what, remedy="take the head (lm_head) out of target_modules")
        bias = getattr(layer, "bias", None)
        self.weight: Tensor = _whole(layer.weight)  # (vocabulary, width)
        self.bias: Tensor | None = None if bias is None else _whole(bias)  # (vocabulary)
        text = inner.config.get_text_config()
        self.cap: float | None = getattr(text, "final_logit_softcapping", None)  # logits: `cap tanh(logits / cap)`
        self.scale = _logit_scale(text)

    @property
    def trained(self) -> bool:
        """Whether the head itself needs a gradient: full fine-tuning, tied embeddings, `modules_to_save`."""
        return self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)

    def keep(self) -> None:
        """Copy a head that is trained in place, so that putting back the model's weights does not reach it."""
        if self.trained:
            self.weight = self.weight.detach().clone()
            self.bias = None if self.bias is None else self.bias.detach().clone()

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Log-softmax of the logits, float32, outside autocast."""
        return self.with_slope(hidden)[0]

    def with_slope(self, hidden: Tensor) -> tuple[Tensor, Tensor | float]:
        """Log-probabilities, and the derivative of the logits by `hidden weight^T + bias`."""
        with torch.autocast(hidden.device.type, enabled=False):
            logits = float32_linear(hidden, self.weight, self.bias)
            slope: Tensor | float = self.scale
            if self.scale != 1.0:
                logits = logits * self.scale
            if self.cap is not None:
                bent = torch.tanh(logits / self.cap)
                logits, slope = self.cap * bent, self.scale * (1 - bent * bent)
            return torch.log_softmax(logits, dim=-1), slope

    def to_hidden(self, d_log_softmax: Tensor, slope: Tensor | float) -> Tensor:
        """The gradient with respect to the hidden states, float32, from that of the logits (overwritten)."""
        if isinstance(slope, Tensor) or slope != 1.0:
            d_log_softmax.mul_(slope)
        with torch.autocast(d_log_softmax.device.type, enabled=False):  # which would round both factors to bfloat16
            return float32_product(d_log_softmax, self.weight)


def float32_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`hidden weight^T + bias` in float32.

    Products of bfloat16 numbers are exact in float32, so a GPU may multiply them as they are and sum in float32: the
    same result as after a conversion, several times faster. That kernel has no derivative.
    """
    if torch.is_grad_enabled() or hidden.ndim != 2 or weight.dtype == torch.float32:
        return nn.functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
    if hidden.dtype == weight.dtype == torch.bfloat16 and hidden.is_cuda:
        logits = _exact_mm(hidden, weight.t())
    else:
        logits = torch.empty(len(hidden), len(weight), dtype=torch.float32, device=hidden.device)
        for rows, block in _float32_blocks(weight):
            logits[:, rows] = hidden.float() @ block.t()
    return logits if bias is None else logits.add_(bias.float())


def float32_product(d: Tensor, weight: Tensor) -> Tensor:
    """`d weight` in float32 for a float32 `d`, without a float32 copy of the weight; `d` may be overwritten.

    On a GPU a bfloat16 weight is multiplied as it is, and `d` in two bfloat16 parts, which carry 16 of its bits.
    Relative errors of a token's gradient, against float64: two parts 3e-6, one part 3e-3, rounding the result to
    bfloat16 (the states' own dtype, in which it leaves the head) 2e-3.
    """
    if weight.dtype == torch.bfloat16 and d.is_cuda:
        return _two_part_product(d, weight)
    if weight.dtype == torch.float32:
        return d @ weight
    found = torch.zeros(len(d), weight.shape[1], dtype=torch.float32, device=d.device)
    for rows, block in _float32_blocks(weight):
        found.addmm_(d[:, rows], block)
    return found


def _two_part_product(d: Tensor, weight: Tensor) -> Tensor:
    high = d.bfloat16()
    low = d.sub_(high).bfloat16()
    return _exact_mm(high, weight).add_(_exact_mm(low, weight))


def _exact_mm(a: Tensor, b: Tensor) -> Tensor:
    """Product of two bfloat16 matrices, summed and returned in float32; CUDA only."""
    return torch.mm(a, b, out_dtype=torch.float32)


def _float32_blocks(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows converted to float32: a whole large head would be gigabytes."""
    for start in range(0, len(weight), VOCABULARY_BLOCK):
        rows = slice(start, start + VOCABULARY_BLOCK)
        yield rows, weight[rows].float()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _logit_scale(text_config: ModelConfig) -> float:
    """The factor on the logits: Cohere multiplies, Granite and MiniCPM divide."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(text_config, name, None) is not None:
            return float(getattr(text_config, name))
    scaling = getattr(text_config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    return float(scaling) if text_config.model_type == "hyperclovax" else 1.0 / float(scaling)


def token_nll(head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
    """`-log p(target)` of every token: hidden states (tokens, width), float32 losses (tokens)."""

    def value(h: Tensor, y: Tensor) -> Tensor:
        return -head.log_probabilities(h).gather(-1, y.unsqueeze(-1)).squeeze(-1)

    return _over_chunks(head, value, nll_and_gradient(head), hidden, targets)


def token_kl(head: Head, hidden: Tensor, head_0: Head, hidden_0: Tensor) -> Tensor:
    """`KL(p_0 || p)` of every token, float32; p_0 is `head_0` on `hidden_0`, neither of which gets a gradient."""

    def value(h: Tensor, h_0: Tensor) -> Tensor:
        with torch.no_grad():
            log_p0 = head_0.log_probabilities(h_0)
        return (log_p0.exp() * (log_p0 - head.log_probabilities(h))).sum(-1)

    return _over_chunks(head, value, kl_and_gradient(head, head_0), hidden, hidden_0)


def nll_and_gradient(head: Head) -> ValueAndGradient:
    """NLL of targets, and its gradient by the hidden states."""
    return lambda h, y: _nll_of(head, *head.with_slope(h), y)


class TokenStatistics(NamedTuple):
    """NLL of every target, its gradient by the hidden state, entropy, and whether the target is the likeliest token."""

    values: Tensor
    gradients: Tensor
    entropy: Tensor
    top1: Tensor


@torch.no_grad()
def nll_with_statistics(head: Head, hidden: Tensor, targets: Tensor) -> TokenStatistics:
    """As `nll_and_gradient`, with what TRL logs of the task's tokens."""
    found = []
    for h, y in _pieces(hidden, targets):
        log_p, slope = head.with_slope(h)
        entropy = -torch.linalg.vecdot(log_p.exp(), log_p)
        top1 = log_p.argmax(-1) == y
        found.append((*_nll_of(head, log_p, slope, y), entropy, top1))
    return TokenStatistics(*(torch.cat(column) for column in zip(*found, strict=True)))


def _nll_of(head: Head, log_p: Tensor, slope: Tensor | float, y: Tensor) -> tuple[Tensor, Tensor]:
    """From log-probabilities, which are overwritten."""
    loss = -log_p.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    d = log_p.exp_()
    d.scatter_add_(-1, y.unsqueeze(-1), d.new_full((len(y), 1), -1.0))
    return loss, head.to_hidden(d, slope)


def kl_and_gradient(head: Head, head_0: Head) -> ValueAndGradient:
    """KL from the reference's distribution, and its gradient by the hidden states."""

    def found(h: Tensor, h_0: Tensor) -> tuple[Tensor, Tensor]:
        # In place: these are the largest tensors of the whole pass.
        log_p0 = head_0.log_probabilities(h_0)
        log_p, slope = head.with_slope(h)
        p_0 = log_p0.exp()
        kl = log_p0.sub_(log_p).mul_(p_0).sum(-1)
        return kl, head.to_hidden(log_p.exp_().sub_(p_0), slope)

    return found


@torch.no_grad()
def over_pieces(fused: ValueAndGradient, hidden: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Values (tokens) and gradients (tokens, width) of all tokens, `TOKEN_CHUNK` at a time."""
    values, gradients = zip(*(fused(*piece) for piece in _pieces(hidden, other)), strict=True)
    return torch.cat(values), torch.cat(gradients)


def _over_chunks(head: Head, value: Value, fused: ValueAndGradient, hidden: Tensor, other: Tensor) -> Tensor:
    """Apply the first function that can do it to pieces of at most `TOKEN_CHUNK` tokens."""
    if torch.is_grad_enabled() and hidden.requires_grad and not head.trained:
        return FusedTokenLoss.apply(hidden, other, fused)  # type: ignore[no-any-return, no-untyped-call]
    pieces = _pieces(hidden, other)
    if len(pieces) == 1:
        return value(*pieces[0])
    if torch.is_grad_enabled():
        return torch.cat([checkpoint(value, *piece, use_reentrant=False) for piece in pieces])
    return torch.cat([value(*piece) for piece in pieces])


def _pieces(hidden: Tensor, other: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(torch.split(hidden, TOKEN_CHUNK), torch.split(other, TOKEN_CHUNK), strict=True))


class FusedTokenLoss(torch.autograd.Function):
    """Losses of all tokens whose gradient by the hidden states is computed in the forward, chunk by chunk.

    Kept for the backward is one float32 tensor of the shape of the hidden states. The head's weight gets no gradient,
    and there is no second derivative.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, other: Tensor, fused: ValueAndGradient) -> Tensor:
        """`fused(hidden piece, other piece)` gives the losses and their gradients, one row a token."""
        losses, gradients = over_pieces(fused, hidden, other)
        ctx.save_for_backward(gradients)
        ctx.dtype = hidden.dtype
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, per_token: Tensor) -> tuple[Tensor, None, None]:
        """Each token's gradient times the number that arrives for it."""
        (gradient,) = ctx.saved_tensors
        return (gradient * per_token.unsqueeze(-1)).to(ctx.dtype), None, None
