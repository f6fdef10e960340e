"""One batch through both models of a pair: token losses and the KL between the two, summed per example.

In a causal model no position sees what comes after it, so padding on the right changes nothing that is scored, and the
attention mask can be left out. That spares the model a mask of (rows, width, width) and the wait for its check; it is
done only where `padding_is_inert` has seen it to be so.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.data.encode import Encoded, collate
from holdfast.scoring.completion import Batch, States, losses_of, require_understood_head
from holdfast.scoring.head import TOKEN_CHUNK
from holdfast.scoring.transfer import to_device

EXTRA_PADDING = 8
# Nats per token by which padding may move a mean loss: other shapes take other kernels, in bfloat16 (False) and float32
# (True). A model that sees its padding is off by far more.
INERT = {False: 5e-2, True: 1e-3}


def token_counts(rows: Sequence[Encoded], first_k: int) -> dict[str, np.ndarray[Any, np.dtype[np.int32]]]:
    """Scored tokens of every example, and those among its first k."""
    tokens = np.array([row.n_labels for row in rows], dtype=np.int32)
    return {"tokens": tokens, "first_tokens": np.minimum(tokens, np.int32(first_k))}


def losses_and_kl(before: States, after: States, batch: Batch) -> Tensor:
    """Rows total and first of the NLL before, of the NLL after and of KL(before || after); one column an example."""
    pieces = []
    for start in range(0, len(batch.targets), TOKEN_CHUNK):
        piece = slice(start, start + TOKEN_CHUNK)
        log_p, log_q = before.log_probabilities(piece), after.log_probabilities(piece)
        losses = _nll(log_p, batch.targets[piece]), _nll(log_q, batch.targets[piece])
        # In place: over a large vocabulary these are the largest tensors of the whole pass.
        ratio = torch.sub(log_p, log_q, out=log_q)
        pieces.append((*losses, log_p.exp_().mul_(ratio).sum(-1)))
    nll_before, nll_after, kl = (torch.cat(column) for column in zip(*pieces, strict=True))
    sums = (nll_before, nll_before * batch.early, nll_after, nll_after * batch.early, kl, kl * batch.early)
    return batch.per_example(torch.stack([values.double() for values in sums]))


def _nll(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    return -log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def needs_mask(model: Any, example: Encoded, pad_token_id: int, device: torch.device) -> bool:
    """Whether padding shows without an attention mask, seen on one example.

    Where its mean loss, padded and without a mask, is that of the model's own logits without padding, two forwards show
    both: the head is understood, and padding is inert. A model whose own logits are not what we compute is refused.
    """
    ids = to_device(torch.tensor([example.input_ids]), device)
    batch = Batch.of([example], pad_token_id=pad_token_id, first_k=1, device=device, masked=False)
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    theirs = _nll(torch.log_softmax(logits[0, batch.at].float(), -1), batch.targets).mean()
    if padding_is_inert(model, example, pad_token_id=pad_token_id, device=device, alone=theirs):
        return False
    tensors = {name: tensor.to(device) for name, tensor in collate([example], 0).items()}
    alone = require_understood_head(model, tensors)
    return not padding_is_inert(model, example, pad_token_id=pad_token_id, device=device, alone=alone)


@torch.no_grad()
def padding_is_inert(
    model: Any, example: Encoded, *, pad_token_id: int, device: torch.device, alone: Tensor | None = None
) -> bool:
    """Whether padding on the right leaves an example's losses alone without an attention mask, rounding aside.

    `alone` is the example's mean loss without padding, where it is known.
    """

    def padded(extra: int) -> Tensor:
        width = len(example.input_ids) + extra
        batch = Batch.of([example], pad_token_id=pad_token_id, first_k=1, device=device, masked=False, width=width)
        return losses_of(model, batch)[0, 0] / example.n_labels

    gap = (padded(0) if alone is None else alone) - padded(EXTRA_PADDING)
    return bool(gap.abs() <= INERT[model.get_input_embeddings().weight.dtype == torch.float32])
