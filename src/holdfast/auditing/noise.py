"""The noise floor of an audit: how far `before` strays from itself when only the batches are put together otherwise.

Other padding and other kernels move each loss a little, more so in bfloat16. The floor is the 99 % quantile of |D_i| of
`before` against itself, over the at most 64 examples with the smallest ids, which are hashes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.auditing.batches import FEWEST_TOKENS, batches, shuffled_batches, smaller_budget
from holdfast.auditing.measure import Array, Launch, Measured, Measurer
from holdfast.auditing.scoring import losses_and_kl
from holdfast.data.encode import Encoded
from holdfast.scoring.batch import States
from holdfast.scoring.completion import Head, deterministic

QUANTILE = 0.99
SAMPLE = 64
SEED = 0


def second_pass(measurer: Measurer, encoded: Sequence[Encoded]) -> Launch:
    """`before` once more on the sample, with random neighbours in smaller batches than the audit's own.

    So few examples take the host longer to launch than the device to run, so `step` wants to be called where the device
    has other work.
    """

    def plan(lengths: Sequence[int], budget: int) -> list[list[int]]:
        # The audit's own batches, evened out, hold between half of the budget and all of it: these are always smaller.
        return shuffled_batches(lengths, _capped(budget, lengths) // 3, SEED)

    return Launch(measurer, ("before",), _sample(encoded), plan)


def floor_between(first: Mapping[str, tuple[float, float]], again: Launch, unit: str) -> float:
    """The noise floor between a second pass and the audit's own total and first-k losses, by id."""
    before = np.array([first[item.id] for item in again.encoded]).T
    columns = again.columns()
    after = np.stack([columns["nll_before"], columns["first_before"]])
    return _floor(again.encoded, again.measurer.first_k, unit, before, after)


@torch.no_grad()
def noise_floor(measurer: Measurer, encoded: Sequence[Encoded], unit: str) -> float:
    """The noise floor from two passes of its own: kl_token compares distributions, which nobody keeps.

    Once sorted by length as in an audit, once with random neighbours in smaller batches.
    """
    rows = _sample(encoded)
    lengths = [len(row.input_ids) for row in rows]
    with measurer.pair.on("before") as model, deterministic(model):
        budget, head = _capped(measurer.budget, lengths), Head(model)
        while True:
            # The first is filled up: evened out, its batches would be of the second's size, and take the same kernels.
            plans = batches(lengths, budget, even=False), shuffled_batches(lengths, budget // 2, SEED)
            try:
                first, again = (States(_hidden(model, measurer, rows, plan), head) for plan in plans)
                break
            except RuntimeError as error:
                budget = smaller_budget(error, budget, rows=max(map(len, plans[0])))
        sums = losses_and_kl(first, again, measurer.batch(rows, "before")).cpu().numpy()
    return _floor(rows, measurer.first_k, unit, sums[:2], sums[2:4], sums[4])


def _sample(encoded: Sequence[Encoded]) -> list[Encoded]:
    return sorted(encoded, key=lambda item: item.id)[:SAMPLE]


def _capped(budget: int, lengths: Sequence[int]) -> int:
    return min(budget, max(FEWEST_TOKENS, sum(lengths)))


def _hidden(model: Any, measurer: Measurer, rows: Sequence[Encoded], plan: list[list[int]]) -> Tensor:
    """The hidden states of every scored token, example after example, run in the given batches."""
    states: dict[int, Tensor] = {}
    for positions in plan:
        hidden = States.of(model, measurer.batch([rows[i] for i in positions], "before")).hidden
        states |= zip(positions, torch.split(hidden, [rows[i].n_labels for i in positions]), strict=True)
    return torch.cat([states[i] for i in range(len(rows))])


def _floor(
    rows: Sequence[Encoded], first_k: int, unit: str, before: Array, after: Array, kl: Array | None = None
) -> float:
    tokens = np.array([row.n_labels for row in rows])
    mean_kl = None if kl is None else kl / tokens
    same = Measured(tokens, np.minimum(tokens, first_k), before[0], after[0], before[1], after[1], mean_kl)
    # In the quantile a NaN would hide what the others say; the audit itself counts such examples.
    return float(np.nanquantile(np.abs(same.degradation(unit)), QUANTILE))
