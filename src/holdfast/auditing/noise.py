"""The noise floor of an audit: how far `before` strays from itself when only the batches are put together otherwise.

Other padding and other kernels move each loss a little, more so in bfloat16. The floor is the 99 % quantile of |D_i| of
`before` against itself, over the at most 64 examples with the smallest ids, which are hashes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    has other work. The audit's own batches, evened out, hold between half of the budget and all of it: a third of it
    always makes smaller ones.
    """

    def plan(lengths: Sequence[int], budget: int) -> list[list[int]]:
        return shuffled_batches(lengths, _capped(budget, lengths) // 3, SEED)

    return Launch(measurer, ("before",), _sample(encoded), plan)


def floor_between(first: Mapping[str, tuple[float, float]], again: Launch, unit: str) -> float:
    """The noise floor between a second pass and the audit's own total and first-k losses, by id."""
    columns, before = again.columns(), np.array([first[item.id] for item in again.encoded]).T
    sums = np.vstack([before, columns["nll_before"], columns["first_before"]])
    return _floor(again.encoded, again.measurer.first_k, unit, sums)


@torch.no_grad()
def noise_floor(measurer: Measurer, encoded: Sequence[Encoded], unit: str) -> float:
    """The noise floor from two passes of its own: kl_token compares distributions, which nobody keeps.

    Once sorted by length and filled up (evened out, batches would be of the second's size, and take the same kernels),
    once with random neighbours in smaller batches.
    """
    rows = _sample(encoded)
    lengths = [len(row.input_ids) for row in rows]
    with measurer.pair.on("before") as model, deterministic(model):

        def hidden(plan: list[list[int]]) -> Tensor:
            states: dict[int, Tensor] = {}
            for positions in plan:
                found = States.of(model, measurer.batch([rows[i] for i in positions], "before")).hidden
                states |= zip(positions, torch.split(found, [rows[i].n_labels for i in positions]), strict=True)
            return torch.cat([states[i] for i in range(len(rows))])

        budget, head = _capped(measurer.budget, lengths), Head(model)
        while True:
            plans = batches(lengths, budget, even=False), shuffled_batches(lengths, budget // 2, SEED)
            try:
                first, again = (States(hidden(plan), head) for plan in plans)
                break
            except RuntimeError as error:
                budget = smaller_budget(error, budget, rows=max(map(len, plans[0])))
        sums = losses_and_kl(first, again, measurer.batch(rows, "before")).cpu().numpy()
    return _floor(rows, measurer.first_k, unit, sums)


def _sample(encoded: Sequence[Encoded]) -> list[Encoded]:
    return sorted(encoded, key=lambda item: item.id)[:SAMPLE]


def _capped(budget: int, lengths: Sequence[int]) -> int:
    return min(budget, max(FEWEST_TOKENS, sum(lengths)))


def _floor(rows: Sequence[Encoded], first_k: int, unit: str, sums: Array) -> float:
    """From rows total and first before, total and first after and, of two passes, the KL; one column an example."""
    tokens = np.array([row.n_labels for row in rows])
    mean_kl = sums[4] / tokens if len(sums) > 4 else None
    same = Measured(tokens, np.minimum(tokens, first_k), sums[0], sums[2], sums[1], sums[3], mean_kl)
    # In the quantile a NaN would hide what the others say; the audit itself counts such examples.
    return float(np.nanquantile(np.abs(same.degradation(unit)), QUANTILE))
