"""The noise floor of an audit: how far `before` strays from itself when only the batches are put together otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.auditing.batches import FEWEST_TOKENS, batches, shuffled_batches, token_budget
from holdfast.auditing.measure import Measured, smaller_budget
from holdfast.auditing.pair import Pair
from holdfast.auditing.scoring import Batch, States, losses_and_kl
from holdfast.constraint.completion import Head, deterministic
from holdfast.data.encode import Encoded

QUANTILE = 0.99
SAMPLE = 64


@torch.no_grad()
def noise_floor(
    pair: Pair,
    encoded: Sequence[Encoded],
    unit: str,
    *,
    first_k: int,
    batch_tokens: int | None = None,
    masked: bool = True,
    seed: int = 0,
) -> float:
    """The 99 % quantile of |D_i| of `before` against itself, over at most 64 examples, in `unit`.

    Twice the same model: once sorted by length as in an audit, once with random neighbours in smaller batches. Other
    padding and other kernels move each loss a little, more so in bfloat16.
    """
    chosen = sorted(range(len(encoded)), key=lambda i: encoded[i].id)[:SAMPLE]
    rows = [encoded[i] for i in chosen]
    lengths = [len(row.input_ids) for row in rows]
    pad = pair.tokenizers.before.pad_token_id
    with pair.on("before") as model, deterministic(model):
        budget = min(batch_tokens or token_budget(model, pair.device), max(FEWEST_TOKENS, sum(lengths)))
        plans = [batches(lengths, budget), shuffled_batches(lengths, budget // 2, seed)]
        while True:
            try:
                batching = {"pad_token_id": pad, "first_k": first_k, "device": pair.device, "masked": masked}
                first, again = (_hidden(model, rows, plan, batching) for plan in plans)
                break
            except RuntimeError as error:
                budget = smaller_budget(error, budget, rows=max(map(len, plans[0])))
                plans = [batches(lengths, budget), shuffled_batches(lengths, budget // 2, seed)]
        found = _compared(rows, first, again, Head(model), batching)
    # In the quantile a NaN would hide what the others say; the audit itself counts such examples.
    return float(np.nanquantile(np.abs(found.degradation(unit)), QUANTILE))


def _hidden(model: Any, rows: Sequence[Encoded], plan: list[list[int]], batching: dict[str, Any]) -> Tensor:
    """The hidden states of every scored token, example after example, run in the given batches."""
    found: dict[int, Tensor] = {}
    for positions in plan:
        batch = Batch.of([rows[i] for i in positions], **batching)
        states = torch.split(States.of(model, batch).hidden, [rows[i].n_labels for i in positions])
        found |= dict(zip(positions, states, strict=True))
    return torch.cat([found[i] for i in range(len(rows))])


def _compared(rows: Sequence[Encoded], first: Tensor, again: Tensor, head: Head, batching: dict[str, Any]) -> Measured:
    """The two passes as if they were two models."""
    sums = losses_and_kl(States(first, head), States(again, head), Batch.of(rows, **batching))
    nll_before, first_before, nll_after, first_after, kl = sums.cpu().numpy()
    tokens = np.array([row.n_labels for row in rows])
    return Measured(
        tokens=tokens, first_tokens=np.minimum(tokens, batching["first_k"]), nll_before=nll_before,
        nll_after=nll_after, first_before=first_before, first_after=first_after, kl=kl / tokens,
    )  # fmt: skip
