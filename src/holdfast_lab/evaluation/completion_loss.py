"""Loss per token on a task's targets: a utility figure also for a model too small to solve the task.

R = sum_i S_i / sum_i T_i in nats, where S_i is the negative log-likelihood of example i's T_i completion tokens (EOS
among them), the mask being the one of training. Examples are independent, tokens are not, so the interval is the one of
a ratio estimator over examples: R +- t se, with se^2 = n / (n - 1) sum_i (S_i - R T_i)^2 / (sum_i T_i)^2 (delta
method) and t Student's 97.5 % quantile with n - 1 degrees of freedom.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit
from torch import Tensor
from torch.nn.functional import cross_entropy

from holdfast.core.errors import ConfigError, DataError, NumericalError, ResourceError
from holdfast.data.collate import collate
from holdfast.data.encode import IGNORE, MAX_LISTED, Encoded, encode_all, require_usable_tokenizer
from holdfast.data.examples import Example, as_chat, uniform
from holdfast.data.templates import Template
from holdfast.judging.batches import fitting_batches
from holdfast_lab.evaluation.metric import Metric

TOKEN_CHUNK = 512  # completion tokens whose float32 log-probabilities exist at one time


@torch.no_grad()
def completion_loss(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    *,
    batch_size: int = 16,
    max_length: int | None = 512,
    template: Template = "chat",
) -> Metric:
    """Mean negative log-likelihood per completion token over the whole set, with a 95 % interval over examples.

    Dropout is off; the model's modes are put back. The log-softmax runs in float32. A batch that does not fit in memory
    is halved. Examples without a completion token within `max_length` are dropped as in training (up to 5 %), so
    that `n` counts the scored ones; of a completion that is cut, the tokens kept count.

    Args:
        model: a causal language model of transformers, or a PEFT model around one.
        tokenizer: its tokenizer, with the template of training.
        examples: prompts and targets.
        batch_size: examples run together at most.
        max_length: tokens kept of an example; None keeps all.
        template: `none` leaves plain prompts as they are; otherwise they become a user turn.
    """
    if batch_size < 1:
        raise ConfigError(f"completion_loss: batch_size = {batch_size}, expected at least 1", remedy="set 1 or more")
    if not examples:
        raise DataError("completion_loss: no examples, expected at least one", remedy="give a non-empty task set")
    shaped = uniform(examples) if template == "none" else [as_chat(example) for example in examples]
    require_usable_tokenizer(tokenizer, needs_chat=shaped[0].kind == "chat")
    encoded = encode_all(shaped, tokenizer, max_length=max_length, role="task").examples
    with _evaluating(model):
        sums = _sums(model, encoded, tokenizer.pad_token_id, batch_size)
    _require_finite(sums, encoded)
    return ratio(sums, np.array([item.n_labels for item in encoded], dtype=np.float64))


def ratio(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> Metric:
    """sum(sums) / sum(counts) with the interval of the module's formula, never below 0; None for one example."""
    n, total = len(sums), float(counts.sum())
    value = float(sums.sum()) / total
    if n < 2:
        return Metric(value, None, None, n)
    spread = n / (n - 1) * float(((sums - value * counts) ** 2).sum())
    half = float(stdtrit(n - 1, 0.975)) * spread**0.5 / total
    return Metric(value, max(0.0, value - half), value + half, n)


def _sums(model: Any, encoded: Sequence[Encoded], pad: int, batch_size: int) -> NDArray[np.float64]:
    # The longest first: what does not fit in memory shows at the start.
    order = sorted(range(len(encoded)), key=lambda i: -len(encoded[i].input_ids))
    narrow = _takes_positions(model)

    def batch_sums(chosen: list[int]) -> NDArray[np.float64]:
        rows = collate([encoded[i] for i in chosen], pad)
        return np.asarray(_batch_sums(model, rows, narrow=narrow).cpu())

    def too_large(place: int) -> ResourceError:
        return ResourceError(
            f"the loss of a single example of {len(encoded[place].input_ids)} tokens does not fit in memory",
            remedy="load the model in bfloat16, use a larger device, or lower max_length",
        )

    sums = np.empty(len(encoded))
    for chosen, losses in fitting_batches(order, batch_size, batch_sums, too_large):
        sums[chosen] = losses
    return sums


def _batch_sums(model: Any, batch: dict[str, Tensor], *, narrow: bool) -> Tensor:
    """Summed loss per row, in float64; logits are asked for only at positions that some row is scored on."""
    following = batch["labels"][:, 1:]
    positions = (following != IGNORE).any(0).nonzero().squeeze(1)
    inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
    wanted = {"logits_to_keep": positions.to(model.device)} if narrow else {}
    logits = model(**inputs, use_cache=False, **wanted).logits
    targets = following[:, positions].to(logits.device)
    scored = targets != IGNORE
    at = logits if narrow else logits[:, positions.to(logits.device)]
    pieces = zip(torch.split(at[scored], TOKEN_CHUNK), torch.split(targets[scored], TOKEN_CHUNK), strict=True)
    losses = torch.cat([cross_entropy(some.float(), labels, reduction="none") for some, labels in pieces])
    cells = torch.zeros(scored.shape, dtype=torch.float64, device=logits.device)
    return cells.masked_scatter(scored, losses.double()).sum(1)


def _takes_positions(model: Any) -> bool:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "logits_to_keep" in inspect.signature(inner.forward).parameters


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _require_finite(sums: NDArray[np.float64], encoded: Sequence[Encoded]) -> None:
    wrong = [item.id for item, total in zip(encoded, sums, strict=True) if not np.isfinite(total)]
    if wrong:
        raise NumericalError(
            f"completion_loss: the loss of {len(wrong)} of {len(encoded)} examples is not finite: "
            f"{', '.join(wrong[:MAX_LISTED])}{', ...' if len(wrong) > MAX_LISTED else ''}",
            remedy="the model has diverged, or its dtype overflows: lower the learning rate, or load it in float32",
        )
