"""One batch through both models of a pair: token losses and the KL between the two, summed per example.

In a causal model no position sees what comes after it, so padding on the right changes nothing that is scored, and the
attention mask can be left out. That spares the model a mask of (rows, width, width) and the wait for its check; it is
done only where `padding_is_inert` has seen it to be so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast.constraint.completion import TOKEN_CHUNK, require_understood_head
from holdfast.constraint.scoring import Batch, States, losses_of
from holdfast.constraint.transfer import to_device
from holdfast.data.collate import collate
from holdfast.data.encode import Encoded

EXTRA_PADDING = 8
# Nats per token by which padding may move a mean loss: other shapes take other kernels, in bfloat16 (False) and float32
# (True). A model that sees its padding is off by far more.
INERT = {False: 5e-2, True: 1e-3}


def token_losses_and_kl(before: States, after: States, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """NLL of every scored token under both, and KL(before || after), from the same log-probabilities."""
    pieces = []
    for start in range(0, len(targets), TOKEN_CHUNK):
        piece = slice(start, start + TOKEN_CHUNK)
        y = targets[piece]
        log_p, log_q = before.log_probabilities(piece), after.log_probabilities(piece)
        losses = _nll(log_p, y), _nll(log_q, y)
        # In place: over a large vocabulary these are the largest tensors of the whole pass.
        ratio = torch.sub(log_p, log_q, out=log_q)
        pieces.append((*losses, log_p.exp_().mul_(ratio).sum(-1)))
    nll_before, nll_after, kl = (torch.cat(column) for column in zip(*pieces, strict=True))
    return nll_before, nll_after, kl


def _nll(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    return -log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def losses_and_kl(before: States, after: States, batch: Batch) -> Tensor:
    """Rows total and first before, total and first after, summed KL; one column an example."""
    nll_before, nll_after, kl = token_losses_and_kl(before, after, batch.targets)
    sums = (nll_before, nll_before * batch.early, nll_after, nll_after * batch.early, kl)
    return batch.per_example(torch.stack([values.double() for values in sums]))


def needs_mask(model: Any, example: Encoded, pad_token_id: int, device: torch.device) -> bool:
    """Whether padding shows without an attention mask, seen on one example.

    Raises:
        UnsupportedError: the model's own logits are not what we compute.
    """
    if padded_loss_is_its_own(model, example, pad_token_id=pad_token_id, device=device):
        return False
    batch = {name: tensor.to(device) for name, tensor in collate([example], 0).items()}
    alone = require_understood_head(model, batch)
    return not padding_is_inert(model, example, pad_token_id=pad_token_id, device=device, alone=alone)


@torch.no_grad()
def padded_loss_is_its_own(model: Any, example: Encoded, *, pad_token_id: int, device: torch.device) -> bool:
    """Whether an example's mean loss, padded and without a mask, is that of the model's own logits without padding.

    Then both hold, by two forwards: the head is understood, and padding is inert. Otherwise one of them may not.
    """
    ids = to_device(torch.tensor([example.input_ids]), device)
    batch = Batch.of([example], pad_token_id=pad_token_id, first_k=1, device=device, masked=False)
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    theirs = _nll(torch.log_softmax(logits[0, batch.at].float(), -1), batch.targets).mean()
    return _inert(model, theirs - _padded(model, example, pad_token_id, device, EXTRA_PADDING))


@torch.no_grad()
def padding_is_inert(
    model: Any, example: Encoded, *, pad_token_id: int, device: torch.device, alone: Tensor | None = None
) -> bool:
    """Whether padding on the right leaves an example's losses alone without an attention mask, rounding aside.

    Args:
        alone: the example's mean loss without padding, where it is known.
    """

    if alone is None:
        alone = _padded(model, example, pad_token_id, device, 0)
    return _inert(model, alone - _padded(model, example, pad_token_id, device, EXTRA_PADDING))


def _padded(model: Any, example: Encoded, pad_token_id: int, device: torch.device, extra: int) -> Tensor:
    """Mean loss of an example with `extra` tokens of padding, without an attention mask."""
    width = len(example.input_ids) + extra
    batch = Batch.of([example], pad_token_id=pad_token_id, first_k=1, device=device, masked=False, width=width)
    return losses_of(model, batch)[0, 0] / example.n_labels


def _inert(model: Any, gap: Tensor) -> bool:
    exact = model.get_input_embeddings().weight.dtype == torch.float32
    return bool(gap.abs() <= INERT[exact])
