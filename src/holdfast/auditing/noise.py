"""The noise floor: how far `before` strays from itself when only the batches are put together otherwise.

Other padding and other kernels move each loss a little, more so in bfloat16. The floor is the 99 % quantile of |D_i| of
`before` against itself, over the at most 64 examples with the smallest ids, which are hashes.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from holdfast.auditing.batches import (
    FEWEST_TOKENS,
    batches,
    losses_and_kl,
    shuffled_batches,
    smaller_budget,
    token_counts,
)
from holdfast.auditing.endpoint import EndpointLaunch
from holdfast.auditing.measure import Launch, Measured, Measurer
from holdfast.data.encode import Encoded
from holdfast.scoring.completion import States, deterministic
from holdfast.scoring.head import Head

QUANTILE, SAMPLE, SEED = 0.99, 64, 0


def second_pass(measurer: Measurer, encoded: Sequence[Encoded]) -> Launch | EndpointLaunch:
    """`before` once more on the sample, with random neighbours in smaller batches than the audit's own.

    To launch so few examples takes longer than to run them, so `step` is for where the device has other work. The
    audit's own batches, evened out, hold at least half of the budget: a third of it always makes smaller ones.
    """

    def plan(lengths: Sequence[int], budget: int) -> list[list[int]]:
        return shuffled_batches(lengths, _capped(budget, lengths) // 3, SEED)

    rows = _sample(encoded)
    if "before" in measurer.pair.served:
        rows.reverse()  # the server makes the batches: in the opposite order they are others
    return measurer.prepared(("before",), rows, plan)


def floor_between(first: Mapping[str, tuple[float, float]], again: Launch | EndpointLaunch, unit: str) -> float:
    """The noise floor between a second pass and the audit's own total and first-k losses, by id."""
    found = again.columns()
    nll, early = np.array([first[item.id] for item in again.encoded]).T
    losses = nll, found["nll_before"], early, found["first_before"]
    return _floor(Measured(found["tokens"], found["first_tokens"], *losses), unit)


@torch.no_grad()
def noise_floor(measurer: Measurer, encoded: Sequence[Encoded], unit: str) -> float:
    """The noise floor from two passes of its own: a KL compares distributions, which nobody keeps.

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

        budget, head = _capped(measurer.budget("before"), lengths), Head(model)
        while True:
            plans = batches(lengths, budget, even=False), shuffled_batches(lengths, budget // 2, SEED)
            try:
                first, again = (States(hidden(plan), head) for plan in plans)
                break
            except RuntimeError as error:
                budget = smaller_budget(error, budget, rows=max(map(len, plans[0])))
        sums = losses_and_kl(first, again, measurer.batch(rows, "before")).cpu().numpy()
    nll, early, nll_again, early_again, kl, early_kl = sums
    tokens, early_tokens = token_counts(rows, measurer.first_k).values()
    kls = kl / tokens, early_kl / early_tokens
    return _floor(Measured(tokens, early_tokens, nll, nll_again, early, early_again, *kls), unit)


def _sample(encoded: Sequence[Encoded]) -> list[Encoded]:
    return sorted(encoded, key=lambda item: item.id)[:SAMPLE]


def _capped(budget: int, lengths: Sequence[int]) -> int:
    return min(budget, max(FEWEST_TOKENS, sum(lengths)))


def _floor(same: Measured, unit: str) -> float:
    # In the quantile a NaN would hide what the others say; the audit itself counts such examples.
    return float(np.nanquantile(np.abs(same.degradation(unit)), QUANTILE))
