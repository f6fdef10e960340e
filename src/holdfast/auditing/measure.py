"""Losses of a set of examples under both models of a pair, the degradations they give, and the noise floor of these.

The noise floor is how far `before` strays from itself when only the batches are put together otherwise: other padding
and other kernels move each loss a little, more so in bfloat16. It is the 99 % quantile of |D_i| of `before` against
itself, over the at most 64 examples with the smallest ids, which are hashes.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from holdfast.auditing.batches import (
    FEWEST_TOKENS,
    batches,
    losses_and_kl,
    needs_mask,
    shuffled_batches,
    smaller_budget,
    token_budget,
    token_counts,
)
from holdfast.auditing.endpoint import EndpointLaunch
from holdfast.auditing.pair import NAMES, Name, Pair
from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.core.registry import nearest
from holdfast.core.units import UNITS
from holdfast.data.encode import Encoded
from holdfast.scoring.completion import Batch, States, deterministic, losses_of
from holdfast.scoring.head import Head, causal_lm
from holdfast.scoring.transfer import OnHost

logger = logging.getLogger(__name__)

QUANTILE, SAMPLE, SEED = 0.99, 64, 0  # of the noise floor

Array = np.ndarray[Any, np.dtype[Any]]
Sides = tuple[Name, ...]  # that a batch goes through before the next one is made: both, or one
Progress = Callable[[int, int], None]  # done, total
Count = Callable[[int], None]
Plan = Callable[[Sequence[int], int], list[list[int]]]
Gap = Callable[[float], None]  # a forward now runs on the device: the share of the examples handed over so far


@dataclass(frozen=True)
class Measured:
    """Losses of every example under both models, in nats: summed over the completion, and over its first k tokens.

    `tokens` counts scored tokens (of `before`'s reading, where each model has its own tokenizer), `first_tokens` those
    among the first k; `kl` and `kl_first` are means of KL(before || after) per token over the completion and over its
    first k tokens, where they were measured.
    """

    tokens: Array
    first_tokens: Array
    nll_before: Array
    nll_after: Array
    first_before: Array
    first_after: Array
    kl: Array | None = None
    kl_first: Array | None = None

    def degradation(self, unit: str) -> Array:
        """D of every example: after minus before, in `unit`."""
        if unit == "nll_sum":
            return self.nll_after - self.nll_before
        if unit == "nll_first":
            return (self.first_after - self.first_before) / self.first_tokens
        if unit == "nll_token":
            return (self.nll_after - self.nll_before) / self.tokens
        if unit not in UNITS:
            raise ConfigError(f"unknown unit {unit!r}", remedy=nearest(unit, list(UNITS)))
        divergence = self.kl if unit == "kl_token" else self.kl_first
        if divergence is None:
            raise UnsupportedError(f"{unit} was not measured", remedy="ask for it: kl=True (--kl)")
        return divergence


class Measurer:
    """Runs examples through a pair in batches of `batch_tokens` padded tokens, or of what memory allows.

    KL is measured where an adapter can be switched, unless given. Batches carry an attention mask unless `check` finds
    that they can do without.
    """

    def __init__(self, pair: Pair, *, first_k: int, kl: bool | None = None, batch_tokens: int | None = None) -> None:
        self.pair, self.first_k, self.batch_tokens, self.masked = pair, first_k, batch_tokens, True
        self.kl = kl_wanted(pair, kl)

    @property
    def passes(self) -> tuple[Sides, ...]:
        """One pass through both models where both are at hand or KL compares them, else one through each."""
        joint = (self.pair.together or self.kl) and not self.pair.tokenizers.own
        return (NAMES,) if joint else (("before",), ("after",))

    def budget(self, side: Name) -> int:
        """Padded tokens a batch; sized to memory when `side`, the last of a pass, is loaded."""
        if self.batch_tokens is None:
            self.batch_tokens = token_budget(self.pair.model(side), self.pair.device)
        return self.batch_tokens

    def batch(self, rows: Sequence[Encoded], side: Name) -> Batch:
        pad, device = self.pair.tokenizers.of(side).pad_token_id, self.pair.device
        return Batch.of(rows, pad_token_id=pad, first_k=self.first_k, device=device, masked=self.masked)

    def check(self, sides: Sides, example: Encoded) -> None:
        """Refuse models whose own logits are not what we compute, and see whether they need an attention mask.

        Where both share their base, `after` has all that `before` has.
        """
        if sides[0] in self.pair.served:
            return  # what an endpoint answers is checked in every answer
        if self.kl and len(sides) > 1:
            if not self.pair.together:
                logger.info("both models are held in memory, since KL compares them token by token")
            rows = [causal_lm(self.pair.model(side)).get_output_embeddings().weight.shape[0] for side in NAMES]
            if rows[0] != rows[1]:
                what = f"KL needs one vocabulary, and the heads have {rows[0]} and {rows[1]} rows"
                raise UnsupportedError(what, remedy="use unit nll_token without kl")
        self.masked = False
        for side in sides[-1:] if self.pair.switchable else sides:
            pad = self.pair.tokenizers.of(side).pad_token_id
            try:
                with self.pair.on(side) as model, deterministic(model):
                    self.masked |= needs_mask(model, example, pad, self.pair.device)
            except RuntimeError as error:
                smaller_budget(error, len(example.input_ids), rows=1)

    def launch(
        self, sides: Sides, encoded: Sequence[Encoded], count: Count | None = None, gap: Gap | None = None
    ) -> "Launch | EndpointLaunch":
        """Hand all examples to the device; the `columns` of what comes back wait for the results."""
        return self.prepared(sides, encoded).finish(count, gap)

    def prepared(self, sides: Sides, encoded: Sequence[Encoded], plan: Plan = batches) -> "Launch | EndpointLaunch":
        """The same, before anything is launched."""
        endpoint = self.pair.ref(sides[0]).endpoint
        if endpoint is None:
            return Launch(self, sides, encoded, plan)
        self.batch_tokens = 0  # the server makes the batches
        return EndpointLaunch(endpoint, self.pair.tokenizers.of(sides[0]), sides[0], encoded, self.first_k)


class Launch:
    """Examples on their way through models, a batch at a time; each batch goes through all `sides`.

    Out of memory, the rest is tried again in batches of half the tokens. `plan` makes batches of given lengths within
    a budget of padded tokens.
    """

    def __init__(self, measurer: Measurer, sides: Sides, encoded: Sequence[Encoded], plan: Plan) -> None:
        self.measurer, self.sides, self.encoded, self.plan = measurer, sides, encoded, plan
        self.kl = measurer.kl and len(sides) > 1
        self.order: list[int] = []
        self._results: list[Tensor] = []
        self.todo = self._planned(range(len(encoded)))

    def _planned(self, left: Sequence[int]) -> list[list[int]]:
        chosen = self.plan([len(self.encoded[i].input_ids) for i in left], self.measurer.budget(self.sides[-1]))
        return [[left[i] for i in positions] for positions in chosen]

    @torch.no_grad()
    def step(self, gap: Gap | None = None) -> int:
        """Launch one batch; returns how many examples it has, 0 where none is left. Models are `deterministic`."""
        if not self.todo:
            return 0
        positions = self.todo[0]
        try:
            batch = self.measurer.batch([self.encoded[i] for i in positions], self.sides[0])
            self._results.append(self._run(batch, gap))
        except RuntimeError as error:
            budget = self.measurer.budget(self.sides[-1])
            self.measurer.batch_tokens = smaller_budget(error, budget, rows=len(positions))
            self.todo = self._planned(sorted(i for positions in self.todo for i in positions))
            return self.step(gap)
        self.order += self.todo.pop(0)
        return len(positions)

    def _run(self, batch: Batch, gap: Gap | None) -> Tensor:
        outputs: list[Any] = []
        for number, side in enumerate(self.sides, 1):
            if outputs and self.measurer.pair.mode == "one model":
                outputs.append(outputs[0])  # of the one model that both sides are
                break
            with self.measurer.pair.on(side) as model:
                outputs.append(States.of(model, batch) if self.kl else losses_of(model, batch))
            if gap is not None:
                # Before the head: a forward keeps the device longer, and the head is then launched in its time.
                gap((len(self.order) + number / len(self.sides) * len(self.todo[0])) / len(self.encoded))
        return losses_and_kl(outputs[0], outputs[1], batch) if self.kl else torch.cat(outputs)

    def finish(self, count: Count | None = None, gap: Gap | None = None) -> Self:
        """Launch what is left; nothing is waited for. `count` is told the examples of a batch, once a model."""
        with ExitStack() as stack:
            for model in dict.fromkeys(map(self.measurer.pair.model, self.sides)):
                stack.enter_context(deterministic(model))
            while n := self.step(gap):
                if count is not None:
                    count(n * len(self.sides))
        self._values = OnHost(torch.cat(self._results, dim=1))
        return self

    def columns(self) -> dict[str, Array]:
        """Wait for the results, in the examples' order: losses by side, mean KLs and, with `before`, token counts."""
        names = [f"{part}_{side}" for side in self.sides for part in ("nll", "first")]
        rows = self._values.get().numpy()[:, np.argsort(self.order)]
        counts = token_counts(self.encoded, self.measurer.first_k)
        if self.kl:
            names += ["kl", "kl_first"]
            rows[-2:] /= counts["tokens"], counts["first_tokens"]
        return dict(zip(names, rows, strict=True)) | (counts if "before" in self.sides else {})


def kl_wanted(pair: Pair, kl: bool | None) -> bool:
    """Whether KL is measured: where asked for, and unasked where an adapter can be switched."""
    if kl is None:
        return pair.switchable and not pair.tokenizers.own
    if kl and pair.served:
        raise UnsupportedError(
            f"KL of {pair.ref(pair.served[0]).ref}: KL compares whole distributions, and an endpoint gives the logprob "
            "of one token",
            remedy="use unit nll_token, nll_sum or nll_first without kl, or audit the weights that are served",
        )
    if kl and pair.tokenizers.own:
        what = "KL is not defined across tokenizers: the two distributions are over other tokens"
        raise UnsupportedError(what, remedy="use unit nll_sum, or read both models with one tokenizer")
    return kl


def measure_pair(
    pair: Pair, encoded: Sequence[Encoded] | Mapping[Name, Sequence[Encoded]], *, first_k: int,
    kl: bool | None = None, batch_tokens: int | None = None, progress: Progress | None = None,
) -> Measured:  # fmt: skip
    """Measure examples under both models: for each side its own, where each model has its own tokenizer.

    `kl` holds both models if need be; None: where an adapter can be switched. `progress` is called with (done, total),
    each example counted once a model.
    """
    read = encoded if isinstance(encoded, Mapping) else dict.fromkeys(NAMES, encoded)
    measurer = Measurer(pair, first_k=first_k, kl=kl, batch_tokens=batch_tokens)
    count = counter(progress, 2 * len(read["before"]))
    columns: dict[str, Array] = {}
    for sides in measurer.passes:
        rows = read[sides[0]]
        measurer.check(sides, rows[0])
        columns |= measurer.launch(sides, rows, count).columns()
        pair.leave(sides[0])
    return Measured(**columns)


def counter(progress: Progress | None, total: int) -> Count:
    """Tells `progress` of (done, total), each example counted once a model."""
    done = 0

    def count(n: int) -> None:
        nonlocal done
        done += n
        if progress is not None:
            progress(done, total)

    return count


def second_pass(measurer: Measurer, encoded: Sequence[Encoded]) -> Launch | EndpointLaunch:
    """`before` once more on the sample, with random neighbours in smaller batches than the audit's own.

    So few examples take the host longer to launch than the device to run, so `step` wants to be called where the device
    has other work. The audit's own batches, evened out, hold between half of the budget and all of it: a third of it
    always makes smaller ones.
    """

    def plan(lengths: Sequence[int], budget: int) -> list[list[int]]:
        return shuffled_batches(lengths, _capped(budget, lengths) // 3, SEED)

    rows = _sample(encoded)
    if "before" in measurer.pair.served:
        rows.reverse()  # the server makes the batches: in the opposite order they are others
    return measurer.prepared(("before",), rows, plan)


def floor_between(first: Mapping[str, tuple[float, float]], again: Launch | EndpointLaunch, unit: str) -> float:
    """The noise floor between a second pass and the audit's own total and first-k losses, by id."""
    columns = again.columns()
    nll, early = np.array([first[item.id] for item in again.encoded]).T
    losses = nll, columns["nll_before"], early, columns["first_before"]
    return _floor(Measured(columns["tokens"], columns["first_tokens"], *losses), unit)


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
