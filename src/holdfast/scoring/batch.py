"""One batch through a model without gradients: the completion's token losses, summed per example.

Everything stays on the device until the caller asks for it, and which tokens count is worked out on the host: no step
waits for the device. The sums are those of `holdfast.scoring.completion`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from holdfast.data.encode import Encoded, collate
from holdfast.scoring.completion import IGNORE, adapters_off, hidden_states
from holdfast.scoring.head import Head, token_kl, token_nll
from holdfast.scoring.transfer import to_device


@dataclass(frozen=True)
class Batch:
    """A right-padded batch on the device.

    Attributes:
        inputs: `input_ids` and, where it says anything, `attention_mask`, of shape (rows, width).
        at: for every scored token, the flat position (row * width + position) that predicts it.
        targets: the scored tokens.
        early: 1.0 where the token is among its completion's first k, else 0.0.
    """

    inputs: dict[str, Tensor]
    at: Tensor
    targets: Tensor
    early: Tensor

    @classmethod
    def of(
        cls,
        rows: Sequence[Encoded],
        *,
        pad_token_id: int,
        first_k: int,
        device: torch.device,
        masked: bool = True,
        width: int | None = None,
    ) -> Self:
        """Pad to the longest row (to a multiple of `width`), find the scored tokens, and send both to the device.

        A mask of ones is left out: no mask means the same, and a model waits for the device to find that out.
        """
        tensors = collate(rows, pad_token_id, width)
        if not masked or bool(tensors["attention_mask"].all()):
            del tensors["attention_mask"]
        following = tensors.pop("labels").roll(-1, dims=1)
        following[:, -1] = IGNORE
        scored = following != IGNORE
        at = scored.flatten().nonzero().squeeze(1)
        early = (scored.cumsum(1) <= first_k).flatten()[at].double()
        inputs = {name: to_device(tensor, device) for name, tensor in tensors.items()}
        targets = to_device(following.flatten()[at], device)
        return cls(inputs, to_device(at, device), targets, to_device(early, device))

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
    def of(cls, model: Any, batch: Batch) -> Self:
        """Run the model; its own head is left out."""
        hidden = hidden_states(model, batch.inputs)
        return cls(hidden.flatten(0, 1).index_select(0, batch.at), Head(model))

    def log_probabilities(self, piece: slice) -> Tensor:
        """Of a piece of the tokens, float32."""
        return self.head.log_probabilities(self.hidden[piece])


def losses_of(model: Any, batch: Batch) -> Tensor:
    """Rows `total` and `first` (summed NLL of the completion and of its first k tokens), one column an example."""
    states = States.of(model, batch)
    nll = token_nll(states.head, states.hidden, batch.targets)
    return batch.per_example(torch.stack([nll, nll * batch.early]))


def kl_of(model: Any, batch: Batch) -> Tensor:
    """Summed `KL(pi_0 || pi_theta)` of every example's completion, one row; pi_0 is the model without its adapters."""
    with adapters_off(model):
        reference = States.of(model, batch)
    states = States.of(model, batch)
    kl = token_kl(states.head, states.hidden, reference.head, reference.hidden)
    return batch.per_example(kl).unsqueeze(0)
