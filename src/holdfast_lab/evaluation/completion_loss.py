"""Loss per token on a task's targets: a utility figure also for a model too small to solve the task.

R = sum_i S_i / sum_i T_i in nats, where S_i is the negative log-likelihood of example i's T_i completion tokens (EOS
among them), the mask being the one of training. Examples are independent, tokens are not, so the interval is the one of
a ratio estimator over examples: R +- t se, with se^2 = n / (n - 1) sum_i (S_i - R T_i)^2 / (sum_i T_i)^2 (delta
method) and t Student's 97.5 % quantile with n - 1 degrees of freedom.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit

from holdfast.core.errors import ConfigError, DataError, NumericalError, ResourceError
from holdfast.core.library_types import LanguageModel, Tokenizer
from holdfast.data.encode import MAX_LISTED, Encoded, collate, encode_all, require_usable_tokenizer
from holdfast.data.examples import Example, as_chat, uniform
from holdfast.data.templates import Template
from holdfast.models.library_errors import fitting_batches
from holdfast.scoring.completion import completion_losses, deterministic
from holdfast_lab.evaluation.harm import Metric


def completion_loss(
    model: LanguageModel, tokenizer: Tokenizer, examples: Sequence[Example], *, batch_size: int = 16,
    max_length: int | None = 512, template: Template = "chat",
) -> Metric:  # fmt: skip
    """Mean negative log-likelihood per completion token over the whole set, with a 95 % interval over examples.

    Dropout is off; the model's modes are put back. Head and log-softmax run in float32. A batch that does not fit in
    memory is halved. Examples without a completion token within `max_length` are dropped as in training (up to 5 %), so
    that `n` counts the scored ones; of a completion that is cut, the tokens kept count. Template `none` leaves plain
    prompts as they are; otherwise they become a user turn.
    """
    if batch_size < 1:
        raise ConfigError(f"completion_loss: batch_size = {batch_size}, expected at least 1", remedy="set 1 or more")
    if not examples:
        raise DataError("completion_loss: no examples, expected at least one", remedy="give a non-empty task set")
    shaped = uniform(examples) if template == "none" else [as_chat(example) for example in examples]
    require_usable_tokenizer(tokenizer, needs_chat=shaped[0].kind == "chat")
    encoded = encode_all(shaped, tokenizer, max_length=max_length, role="task").examples
    sums = _sums(model, encoded, tokenizer.pad_token_id, batch_size)
    if wrong := [item.id for item, total in zip(encoded, sums, strict=True) if not np.isfinite(total)]:
        named = ", ".join(wrong[:MAX_LISTED]) + (", ..." if len(wrong) > MAX_LISTED else "")
        raise NumericalError(
            f"completion_loss: the loss of {len(wrong)} of {len(encoded)} examples is not finite: {named}",
            remedy="the model has diverged, or its dtype overflows: lower the learning rate, or load it in float32",
        )
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


@torch.no_grad()
def _sums(model: LanguageModel, encoded: Sequence[Encoded], pad: int, batch_size: int) -> NDArray[np.float64]:
    # The longest first: what does not fit in memory shows at the start.
    order = sorted(range(len(encoded)), key=lambda i: -len(encoded[i].input_ids))

    def batch_sums(chosen: list[int]) -> NDArray[np.float64]:
        rows = collate([encoded[i] for i in chosen], pad)
        batch = {name: tensor.to(model.device) for name, tensor in rows.items()}
        return np.asarray(completion_losses(model, batch, first_k=1).total.cpu())

    def too_large(place: int) -> ResourceError:
        return ResourceError(
            f"the loss of a single example of {len(encoded[place].input_ids)} tokens does not fit in memory",
            remedy="load the model in bfloat16, use a larger device, or lower max_length",
        )

    sums = np.empty(len(encoded))
    with deterministic(model):
        for chosen, losses in fitting_batches(order, batch_size, batch_sums, too_large):
            sums[chosen] = losses
    return sums
