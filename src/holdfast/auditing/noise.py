"""The noise floor of an audit: how far `before` strays from itself when only the batches are put together otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.auditing.batches import FEWEST_TOKENS, batches, shuffled_batches, smaller_budget, token_budget
from holdfast.auditing.measure import Measured
from holdfast.auditing.pair import Pair
from holdfast.auditing.scoring import losses_and_kl
from holdfast.constraint.completion import Head, deterministic
from holdfast.constraint.scoring import Batch, States, losses_of
from holdfast.constraint.transfer import OnHost
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
    rows = _sample(encoded)
    lengths = [len(row.input_ids) for row in rows]
    pad = pair.tokenizers.before.pad_token_id
    with pair.on("before") as model, deterministic(model):
        budget = min(batch_tokens or token_budget(model, pair.device), max(FEWEST_TOKENS, sum(lengths)))
        plans = _plans(lengths, budget, seed)
        while True:
            try:
                batching = {"pad_token_id": pad, "first_k": first_k, "device": pair.device, "masked": masked}
                first, again = (_hidden(model, rows, plan, batching) for plan in plans)
                break
            except RuntimeError as error:
                budget = smaller_budget(error, budget, rows=max(map(len, plans[0])))
                plans = _plans(lengths, budget, seed)
        found = _compared(rows, first, again, Head(model), batching)
    return _quantile(found, unit)


def _plans(lengths: Sequence[int], budget: int, seed: int) -> list[list[list[int]]]:
    # The first is filled up: evened out, its batches would be of the second's size, and take the same kernels.
    return [batches(lengths, budget, even=False), shuffled_batches(lengths, budget // 2, seed)]


@dataclass(frozen=True)
class SecondPass:
    """Losses of a sample under `before`, in another composition than the audit's own, on their way to the host.

    Attributes:
        ids: of the examples, with their scored `tokens` and how many of these are among the first k.
    """

    ids: tuple[str, ...]
    tokens: np.ndarray[Any, np.dtype[Any]]
    first_tokens: np.ndarray[Any, np.dtype[Any]]
    losses: OnHost
    order: tuple[int, ...]

    def floor(self, first: Mapping[str, tuple[float, float]], unit: str) -> float:
        """The 99 % quantile of |D| of `before` against itself; `first`: the audit's total and first-k loss by id."""
        again = self.losses.get().numpy()[:, np.argsort(self.order)]
        total, early = np.array([first[name] for name in self.ids]).T
        same = Measured(
            tokens=self.tokens, first_tokens=self.first_tokens, nll_before=total, nll_after=again[0],
            first_before=early, first_after=again[1],
        )  # fmt: skip
        return _quantile(same, unit)


class SecondRun:
    """A second pass on its way, a batch at a time.

    At most 64 examples go through `before` again, with random neighbours in smaller batches than the audit's. So few
    take the host longer to launch than the device to run, so `step` wants to be called where the device has other work.

    Attributes:
        ids: of the examples.
    """

    def __init__(
        self,
        pair: Pair,
        encoded: Sequence[Encoded],
        *,
        first_k: int,
        batch_tokens: int | None = None,
        masked: bool = True,
        seed: int = 0,
    ) -> None:
        self._pair, self._rows, self._seed, self._first_k = pair, _sample(encoded), seed, first_k
        self.ids = {row.id for row in self._rows}
        self._batching: dict[str, Any] = {
            "pad_token_id": pair.tokenizers.before.pad_token_id, "first_k": first_k, "device": pair.device,
            "masked": masked,
        }  # fmt: skip
        with pair.on("before") as model:
            given = batch_tokens or token_budget(model, pair.device)
        self._budget = min(given, max(FEWEST_TOKENS, sum(len(row.input_ids) for row in self._rows)))
        self._start()

    def _start(self) -> None:
        # The audit's own batches, evened out, hold between half of the budget and all of it: these are always smaller.
        self._plan = shuffled_batches([len(row.input_ids) for row in self._rows], self._budget // 3, self._seed)
        self._found: list[Tensor] = []

    @torch.no_grad()
    def step(self) -> bool:
        """Launch one batch; False where none is left. Out of memory, all of them start again at half the size."""
        if len(self._found) == len(self._plan):
            return False
        rows = [self._rows[i] for i in self._plan[len(self._found)]]
        try:
            with self._pair.on("before") as model, deterministic(model):
                self._found.append(losses_of(model, Batch.of(rows, **self._batching)))
        except RuntimeError as error:
            self._budget = smaller_budget(error, self._budget, rows=max(map(len, self._plan)))
            self._start()
        return True

    def finish(self) -> SecondPass:
        """Launch what is left; nothing is waited for."""
        while self.step():
            pass
        tokens = np.array([row.n_labels for row in self._rows])
        return SecondPass(
            ids=tuple(row.id for row in self._rows), tokens=tokens, first_tokens=np.minimum(tokens, self._first_k),
            losses=OnHost(torch.cat(self._found, dim=1)), order=tuple(i for chosen in self._plan for i in chosen),
        )  # fmt: skip


def _sample(encoded: Sequence[Encoded]) -> list[Encoded]:
    return sorted(encoded, key=lambda item: item.id)[:SAMPLE]


def _quantile(same: Measured, unit: str) -> float:
    # In the quantile a NaN would hide what the others say; the audit itself counts such examples.
    return float(np.nanquantile(np.abs(same.degradation(unit)), QUANTILE))


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
