"""One batch through one model or both: token losses, and the KL between the two, summed per example.

Everything stays on the device until the caller asks for it, and which tokens count is worked out on the host: no step
waits for the device.

In a causal model no position sees what comes after it, so padding on the right changes nothing that is scored, and the
attention mask can be left out. That spares the model a mask of (rows, width, width) and the wait for its check; it is
done only where `padding_is_inert` has seen it to be so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.constraint.completion import IGNORE, TOKEN_CHUNK, Head, hidden_states
from holdfast.data.collate import collate
from holdfast.data.encode import Encoded

EXTRA_PADDING = 8
# Nats per token by which padding may move a mean loss: other shapes take other kernels, in bfloat16 (False) and float32
# (True). A model that sees its padding is off by far more.
INERT = {False: 5e-2, True: 1e-3}


@dataclass(frozen=True)
class Batch:
    """A right-padded batch on the device.

    Attributes:
        inputs: `input_ids` and, where it is needed, `attention_mask`, of shape (rows, width).
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
    ) -> Batch:
        """Pad to the longest row (to a multiple of `width`), find the scored tokens, and send both to the device."""
        tensors = collate(rows, pad_token_id, width)
        if not masked:
            del tensors["attention_mask"]
        following = tensors.pop("labels").roll(-1, dims=1)
        following[:, -1] = IGNORE
        scored = following != IGNORE
        at = scored.flatten().nonzero().squeeze(1)
        early = (scored.cumsum(1) <= first_k).flatten()[at].double()

        def send(tensor: Tensor) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

        inputs = {name: send(tensor) for name, tensor in tensors.items()}
        return cls(inputs, send(at), send(following.flatten()[at]), send(early))

    def per_example(self, values: Tensor) -> Tensor:
        """Sum one value per scored token to one per row, in float64 so that padding does not matter."""
        rows, width = self.inputs["input_ids"].shape
        cells = torch.zeros(rows * width, dtype=torch.float64, device=values.device)
        return cells.index_copy_(0, self.at, values.double()).view(rows, width).sum(1)


@dataclass(frozen=True)
class States:
    """The hidden states that predict a batch's scored tokens, and the head that reads them."""

    hidden: Tensor
    head: Head

    @classmethod
    def of(cls, model: Any, batch: Batch) -> States:
        """Run the model; its own head is left out."""
        hidden = hidden_states(model, batch.inputs)
        return cls(hidden.flatten(0, 1).index_select(0, batch.at), Head(model))

    def log_probabilities(self, start: int) -> Tensor:
        """Of the `TOKEN_CHUNK` tokens from `start`, float32."""
        return self.head.log_probabilities(self.hidden[start : start + TOKEN_CHUNK])


def token_losses(states: States, targets: Tensor) -> Tensor:
    """NLL of every scored token."""
    pieces = [
        _nll(states.log_probabilities(start), targets[start : start + TOKEN_CHUNK])
        for start in range(0, len(targets), TOKEN_CHUNK)
    ]
    return torch.cat(pieces)


def token_losses_and_kl(before: States, after: States, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """NLL of every scored token under both, and KL(before || after), from the same log-probabilities."""
    pieces = []
    for start in range(0, len(targets), TOKEN_CHUNK):
        y = targets[start : start + TOKEN_CHUNK]
        log_p, log_q = before.log_probabilities(start), after.log_probabilities(start)
        losses = _nll(log_p, y), _nll(log_q, y)
        # In place: over a large vocabulary these are the largest tensors of the whole pass.
        ratio = torch.sub(log_p, log_q, out=log_q)
        pieces.append((*losses, (log_p.exp_() * ratio).sum(-1)))
    nll_before, nll_after, kl = (torch.cat(column) for column in zip(*pieces, strict=True))
    return nll_before, nll_after, kl


def _nll(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    return -log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def losses_of(model: Any, batch: Batch) -> Tensor:
    """Rows `total` and `first` (summed NLL of the completion and of its first k tokens), one column an example."""
    nll = token_losses(States.of(model, batch), batch.targets)
    return torch.stack([batch.per_example(nll), batch.per_example(nll * batch.early)])


def losses_and_kl(before: States, after: States, batch: Batch) -> Tensor:
    """Rows total and first before, total and first after, summed KL; one column an example."""
    nll_before, nll_after, kl = token_losses_and_kl(before, after, batch.targets)
    sums = (nll_before, nll_before * batch.early, nll_after, nll_after * batch.early, kl)
    return torch.stack([batch.per_example(values) for values in sums])


@torch.no_grad()
def padding_is_inert(model: Any, example: Encoded, *, pad_token_id: int, device: torch.device) -> bool:
    """Whether padding on the right leaves an example's losses alone without an attention mask, rounding aside."""
    means = []
    for width in (1, len(example.input_ids) + EXTRA_PADDING):
        batch = Batch.of([example], pad_token_id=pad_token_id, first_k=1, device=device, masked=False, width=width)
        means.append(losses_of(model, batch)[0, 0] / example.n_labels)
    exact = model.get_input_embeddings().weight.dtype == torch.float32
    return bool((means[0] - means[1]).abs() <= INERT[exact])
