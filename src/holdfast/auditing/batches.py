"""The batches of an audit: which examples run together, and what one batch gives under both models of a pair.

Examples are sorted by length, as many together as a budget of padded tokens allows. In a causal model no position sees
what comes after it, so padding on the right changes nothing that is scored, and the attention mask can be left out.
That spares the model a mask of (rows, width, width) and the wait for its check; it is done only where
`padding_is_inert` has seen it to be so.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.core.errors import ResourceError
from holdfast.core.library_types import LanguageModel
from holdfast.core.seeding import generator
from holdfast.data.encode import Encoded, collate
from holdfast.models.library_errors import free_memory, out_of_memory
from holdfast.scoring.completion import Batch, States, losses_of, require_understood_head
from holdfast.scoring.head import TOKEN_CHUNK, causal_lm
from holdfast.scoring.transfer import to_device

CPU_TOKENS = 4096
FEWEST_TOKENS, MOST_TOKENS = 512, 131072  # at most: fewer batches are fewer launches, which a small model waits for
_SHARE = 0.5  # of the free memory; the rest is for what the estimate does not know
EXTRA_PADDING = 8
# Nats per token by which padding may move a mean loss: other shapes take other kernels, in bfloat16 (False) and float32
# (True). A model that sees its padding is off by far more.
INERT = {False: 5e-2, True: 1e-3}


def batches(lengths: Sequence[int], budget: int, *, even: bool = True) -> list[list[int]]:
    """Positions in batches with rows * longest <= budget, the longest first; a longer example is alone.

    The longest first: what does not fit in memory shows at the start. `even`: as few batches as the budget allows, by
    the smallest budget that gives no more of them; a last batch of a few rows takes as long to launch as a full one.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))

    def starts(budget: int) -> list[int]:
        found, start = [], 0
        while start < len(order):
            found.append(start)
            start += max(1, budget // lengths[order[start]])
        return found

    if even and order:
        most = len(starts(budget))
        budget = bisect_left(range(budget), -most, key=lambda smaller: -len(starts(smaller)))
    return [order[start:stop] for start, stop in pairwise([*starts(budget), len(order)])]


def shuffled_batches(lengths: Sequence[int], budget: int, seed: int) -> list[list[int]]:
    """Another composition: random neighbours, so other padding and other shapes."""
    batches: list[list[int]] = []
    widest = 0
    for position in generator(seed, "batch composition").permutation(len(lengths)).tolist():
        if not batches or (len(batches[-1]) + 1) * max(widest, lengths[position]) > budget:
            batches.append([])
            widest = 0
        widest = max(widest, lengths[position])
        batches[-1].append(position)
    return batches


def token_budget(model: LanguageModel, device: torch.device) -> int:
    """Padded tokens a batch: a fixed number on a CPU; on a GPU from the free memory and the model's widths.

    A forward pass without gradients holds, per token, a few vectors of the hidden width and of the MLP's width; the
    head adds its float32 log-probabilities for `TOKEN_CHUNK` tokens at a time.
    """
    if device.type != "cuda":
        return CPU_TOKENS
    config = causal_lm(model).config.get_text_config()
    width = int(getattr(config, "hidden_size", 4096))
    inner = int(getattr(config, "intermediate_size", None) or 4 * width)
    place = torch.cuda.current_device() if device.index is None else device.index
    unused, total = torch.cuda.mem_get_info(place)
    share = total * torch.cuda.get_per_process_memory_fraction(place)  # what this process may take of the device
    free = min(unused + torch.cuda.memory_reserved(place), share) - torch.cuda.memory_allocated(place)
    head, per_token = 6 * 4 * TOKEN_CHUNK * int(config.vocab_size), 4 * (16 * width + 4 * inner)
    return max(FEWEST_TOKENS, min(MOST_TOKENS, int((_SHARE * free - head) / per_token)))


def smaller_budget(error: RuntimeError, budget: int, *, rows: int) -> int:
    """Half the budget after running out of memory with a batch of `rows`; any other error is raised again."""
    if not out_of_memory(error):
        raise error
    if rows == 1:
        what = "out of memory with a single example in the batch"
        raise ResourceError(what, remedy="lower max_length, load in bfloat16, or use a larger device") from error
    free_memory()
    return budget // 2


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
def needs_mask(model: LanguageModel, example: Encoded, pad_token_id: int, device: torch.device) -> bool:
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
    model: LanguageModel, example: Encoded, *, pad_token_id: int, device: torch.device, alone: Tensor | None = None
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
