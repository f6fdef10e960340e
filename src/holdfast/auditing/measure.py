"""Losses of a set of examples under both models of a pair, and the degradations they give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from holdfast.auditing.batches import batches, smaller_budget, token_budget
from holdfast.auditing.pair import NAMES, Name, Pair
from holdfast.auditing.scoring import losses_and_kl, needs_mask
from holdfast.constraint.chance import UNITS
from holdfast.constraint.completion import causal_lm, deterministic
from holdfast.constraint.scoring import Batch, States, losses_of
from holdfast.constraint.transfer import OnHost
from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.core.registry import nearest
from holdfast.data.encode import Encoded

Array = np.ndarray[Any, np.dtype[Any]]
Progress = Callable[[int, int], None]
PassName = Literal["both", "before", "after"]
Count = Callable[[int], None]
Collect = Callable[[], dict[str, Array]]
Gap = Callable[[float], None]
"""Called when a forward was handed to the device and runs there, with the share of the examples handed over so far."""


@dataclass(frozen=True)
class Measured:
    """Losses of every example under both models, in nats.

    Attributes:
        tokens: scored tokens of the completion (of `before`'s reading, where each model has its own tokenizer).
        first_tokens: of these, how many are among the first k.
        nll_before, nll_after: summed over the completion.
        first_before, first_after: summed over its first k tokens.
        kl: mean over the completion of KL(before || after) per token; None when not measured.
        own: whether each model read its own tokens; then only `nll_sum` is defined.
    """

    tokens: Array
    first_tokens: Array
    nll_before: Array
    nll_after: Array
    first_before: Array
    first_after: Array
    kl: Array | None = None
    own: bool = False

    def degradation(self, unit: str) -> Array:
        """D of every example: after minus before, in `unit`."""
        if unit not in UNITS:
            raise ConfigError(f"unknown unit {unit!r}", remedy=nearest(unit, list(UNITS)))
        if unit == "nll_sum":
            return self.nll_after - self.nll_before
        if self.own:
            raise UnsupportedError(
                f"unit {unit!r} is not defined across tokenizers: it is counted in tokens",
                remedy="use unit nll_sum, or read both models with one tokenizer",
            )
        if unit == "nll_first":
            return (self.first_after - self.first_before) / self.first_tokens
        if unit == "nll_token":
            return (self.nll_after - self.nll_before) / self.tokens
        if self.kl is None:
            raise UnsupportedError("kl_token was not measured", remedy="ask for it: kl=True (--kl)")
        return self.kl


class Measurer:
    """Runs examples through a pair in batches; remembers the budget that memory allowed.

    Attributes:
        kl: whether KL is measured.
        batch_tokens: padded tokens a batch; found at the first use unless given.
        masked: whether batches carry an attention mask; `check` finds out whether they can do without.
    """

    def __init__(self, pair: Pair, *, first_k: int, kl: bool | None = None, batch_tokens: int | None = None) -> None:
        self.pair, self.first_k, self.batch_tokens = pair, first_k, batch_tokens
        self.kl = kl_wanted(pair, kl)
        self.masked = True

    @property
    def joint(self) -> bool:
        """Whether a batch goes through both models before the next one is made."""
        return (self.pair.together or self.kl) and not self.pair.tokenizers.own

    def launch(
        self, name: PassName, encoded: Sequence[Encoded], count: Count | None = None, gap: Gap | None = None
    ) -> Collect:
        """Hand all examples to the device; what comes back waits for the results.

        Under `both` each batch goes through both models: losses of both, and the KL. Otherwise losses of one.
        """
        return self._both(encoded, count, gap) if name == "both" else self._side(name, encoded, count, gap)

    def _both(self, encoded: Sequence[Encoded], count: Count | None, gap: Gap | None) -> Collect:
        pair = self.pair
        pair.hold()
        if self.kl:
            _require_one_vocabulary(pair)
        if pair.mode == "one model":
            one = self._side("before", encoded, count, gap)

            def twice() -> dict[str, Array]:
                found = one()
                zero = {"kl": np.zeros(len(encoded))} if self.kl else {}
                return found | {f"{k.removesuffix('_before')}_after": v for k, v in found.items()} | zero

            return twice

        def run(batch: Batch, done: Gap) -> Tensor:
            with pair.on("before") as model:
                before = States.of(model, batch) if self.kl else losses_of(model, batch)
            done(0.5)
            with pair.on("after") as model:
                after = States.of(model, batch) if self.kl else losses_of(model, batch)
            done(1.0)  # before the head: a forward keeps the device longer, and the head is then launched in its time
            if isinstance(before, Tensor) or isinstance(after, Tensor):
                return torch.cat([before, after])  # type: ignore[list-item]
            return losses_and_kl(before, after, batch)

        with ExitStack() as stack:
            for model in pair.models:
                stack.enter_context(deterministic(model))
            rows = self._over(encoded, pair.tokenizers.before.pad_token_id, run, count, gap)
        names = ("nll_before", "first_before", "nll_after", "first_after", "kl")

        def collect() -> dict[str, Array]:
            columns = dict(zip(names, rows(), strict=False))
            if "kl" in columns:
                columns["kl"] = columns["kl"] / np.array([item.n_labels for item in encoded])
            return columns

        return collect

    def _side(self, name: Name, encoded: Sequence[Encoded], count: Count | None, gap: Gap | None) -> Collect:
        tokenizer = self.pair.tokenizers.before if name == "before" else self.pair.tokenizers.after

        def run(batch: Batch, done: Gap) -> Tensor:
            losses = losses_of(model, batch)
            done(1.0)
            return losses

        with self.pair.on(name) as model, deterministic(model):
            rows = self._over(encoded, tokenizer.pad_token_id, run, count, gap)
        return lambda: dict(zip((f"nll_{name}", f"first_{name}"), rows(), strict=True))

    def check(self, name: Name, example: Encoded) -> None:
        """Refuse a side whose own logits are not what we compute, and see whether it needs an attention mask."""
        tokenizer = self.pair.tokenizers.before if name == "before" else self.pair.tokenizers.after
        try:
            with self.pair.on(name) as model, deterministic(model):
                self.masked = needs_mask(model, example, tokenizer.pad_token_id, self.pair.device)
        except RuntimeError as error:
            smaller_budget(error, len(example.input_ids), rows=1)

    def check_both(self, example: Encoded) -> None:
        """`check` for sides that run one after the other on each batch.

        Where they share their base, `after` has all that `before` has.
        """
        needs = []
        for name in NAMES if not self.pair.switchable else NAMES[-1:]:
            self.check(name, example)
            needs.append(self.masked)
        self.masked = any(needs)

    @torch.no_grad()
    def _over(
        self, encoded: Sequence[Encoded], pad: int, run: Callable[[Batch, Gap], Tensor], count: Count | None,
        gap: Gap | None,
    ) -> Callable[[], Array]:  # fmt: skip
        """`run` on every batch; a function that waits for its rows, for every example in the order given.

        `run` says what share of its batch it has handed over, and `gap` hears what share of all that makes.
        Out of memory, the rest is tried again in batches of half the tokens.
        """
        lengths = [len(item.input_ids) for item in encoded]
        todo = batches(lengths, self._budget())
        order: list[int] = []
        found: list[Tensor] = []
        batching: Any = {"pad_token_id": pad, "first_k": self.first_k, "device": self.pair.device}

        def done(share: float) -> None:
            if gap is not None:
                gap((len(order) + share * len(positions)) / len(encoded))

        while todo:
            positions = todo[0]
            try:
                batch = Batch.of([encoded[i] for i in positions], masked=self.masked, **batching)
                found.append(run(batch, done))
            except RuntimeError as error:
                self.batch_tokens = smaller_budget(error, self._budget(), rows=len(positions))
                left = sorted(i for positions in todo for i in positions)
                todo = [[left[i] for i in chosen] for chosen in batches([lengths[i] for i in left], self._budget())]
                continue
            order += todo.pop(0)
            if count is not None:
                count(len(positions))
        values = OnHost(torch.cat(found, dim=1))
        return lambda: _in_order(values.get().numpy(), order)

    def _budget(self) -> int:
        if self.batch_tokens is None:
            self.batch_tokens = token_budget(self.pair.models[-1], self.pair.device)
        return self.batch_tokens


def _in_order(values: Array, order: list[int]) -> Array:
    """Columns that came in `order`, sorted."""
    found = np.empty_like(values)
    found[:, order] = values
    return found


def kl_wanted(pair: Pair, kl: bool | None) -> bool:
    """Whether KL is measured: where asked for, and unasked where an adapter can be switched.

    Raises:
        UnsupportedError: asked for across tokenizers.
    """
    if kl is None:
        return pair.switchable and not pair.tokenizers.own
    if kl and pair.tokenizers.own:
        raise UnsupportedError(
            "KL is not defined across tokenizers: the two distributions are over other tokens",
            remedy="use unit nll_sum, or read both models with one tokenizer",
        )
    return kl


def _require_one_vocabulary(pair: Pair) -> None:
    """Refuse KL between distributions over other numbers of tokens."""
    rows = [int(causal_lm(model).get_output_embeddings().weight.shape[0]) for model in pair.models]
    if len(set(rows)) > 1:
        raise UnsupportedError(
            f"KL needs one vocabulary, and the heads have {rows[0]} and {rows[1]} rows",
            remedy="use unit nll_token without kl",
        )


def measure_pair(
    pair: Pair,
    encoded: Sequence[Encoded] | Mapping[Name, Sequence[Encoded]],
    *,
    first_k: int,
    kl: bool | None = None,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
) -> Measured:
    """Measure examples under both models.

    Args:
        pair: from `open_pair`.
        encoded: the examples; for each side its own, where each model has its own tokenizer.
        first_k: tokens that `nll_first` looks at.
        kl: measure KL(before || after), holding both models if need be; None: where an adapter can be switched.
        batch_tokens: padded tokens a batch; sized to memory unless given.
        progress: called with (done, total), each example counted once a model.
    """
    sides: dict[Name, Sequence[Encoded]] = (
        {name: encoded[name] for name in ("before", "after")}
        if isinstance(encoded, Mapping)
        else {"before": encoded, "after": encoded}
    )
    measurer = Measurer(pair, first_k=first_k, kl=kl, batch_tokens=batch_tokens)
    count = _counter(progress, 2 * len(sides["before"]))
    if measurer.joint:
        measurer.check_both(sides["before"][0])
        columns = measurer.launch("both", sides["before"], lambda n: count(2 * n))()
    else:
        columns = {}
        for name, _ in pair.sides():
            measurer.check(name, sides[name][0])
            columns |= measurer.launch(name, sides[name], count)()
    labels = np.array([item.n_labels for item in sides["before"]])
    return Measured(tokens=labels, first_tokens=np.minimum(labels, first_k), own=pair.tokenizers.own, **columns)


def _counter(progress: Progress | None, total: int) -> Callable[[int], None]:
    done = 0

    def count(n: int) -> None:
        nonlocal done
        done += n
        if progress is not None:
            progress(done, total)

    return count
