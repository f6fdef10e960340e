"""The measuring of an audit, window by window: read, encode, run, store; memory does not grow with the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from holdfast.auditing.measure import Measured, Measurer, Progress
from holdfast.auditing.noise import noise_floor
from holdfast.auditing.pair import NAMES, Name, Pair
from holdfast.auditing.parts import Parts
from holdfast.auditing.summary import UNITS
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import DataError
from holdfast.data.encode import Encoded, encode_all, require_usable_tokenizer
from holdfast.data.examples import Example
from holdfast.data.stream import ExampleStream

WINDOW = 1024


class Windows:
    """The data of an audit, cut into windows that are measured one after the other.

    Attributes:
        count: how many windows there are.
        n: how many examples.
    """

    def __init__(self, streams: Mapping[str, ExampleStream], pair: Pair, *, max_length: int | None) -> None:
        self.streams, self.pair, self.max_length = streams, pair, max_length
        self.size = WINDOW
        self.count = sum(-(-stream.n // self.size) for stream in streams.values())
        self.n = sum(stream.n for stream in streams.values())
        for tokenizer in {id(t): t for t in (pair.tokenizers.before, pair.tokenizers.after)}.values():
            require_usable_tokenizer(tokenizer, needs_chat=any(stream.chat for stream in streams.values()))

    def examples(self) -> Iterator[tuple[int, str, list[Example]]]:
        """Every window with its number and role."""
        number = 0
        for role, stream in self.streams.items():
            for window in stream.windows(self.size):
                yield number, role, window
                number += 1

    def encode(self, examples: list[Example], name: Name) -> list[Encoded]:
        """Tokens for one side."""
        tokenizer = self.pair.tokenizers.before if name == "before" else self.pair.tokenizers.after
        try:
            return encode_all(examples, tokenizer, max_length=self.max_length, role="safety").examples
        except DataError as error:
            raise DataError(error.what, remedy="raise max_length, or shorten or remove these examples") from None

    def sample(self, name: Name) -> list[Encoded]:
        """The examples for the noise floor, as one side reads them."""
        chosen = sorted((e for stream in self.streams.values() for e in stream.sample), key=lambda e: e.id)
        return self.encode(chosen, name)


def measure_windows(
    windows: Windows,
    parts: Parts,
    constraint: ChanceConstraint,
    *,
    kl: bool | None,
    batch_tokens: int | None,
    progress: Progress | None,
) -> None:
    """Measure every window that has no part yet; in one pass for both models, or in one for each."""
    pair = windows.pair
    measurer = Measurer(pair, first_k=constraint.first_k, kl=kl, batch_tokens=batch_tokens)
    names: tuple[Any, ...] = ("both",) if measurer.joint else NAMES
    count = _Count(progress, 2 * windows.n)
    for name in names:
        if parts.done(name, windows.count) < windows.count:
            _begin(windows.sample(_side(name)), parts, measurer, name, constraint, batch_tokens)
        _pass(windows, parts, measurer, name, count, batch_tokens)
        if not pair.together:
            pair.release(name)


def _side(name: str) -> Name:
    return "after" if name == "after" else "before"


def _begin(
    sample: list[Encoded],
    parts: Parts,
    measurer: Measurer,
    name: str,
    constraint: ChanceConstraint,
    batch_tokens: int | None,
) -> None:
    """Check the models of a pass on one example, and measure the noise floor."""
    if name == "both":
        measurer.check_both(sample[0])
    else:
        measurer.check(_side(name), sample[0])
    if name != "after" and parts.noise() is None:
        settings: dict[str, Any] = {"first_k": constraint.first_k, "batch_tokens": batch_tokens}
        parts.write_noise(noise_floor(measurer.pair, sample, constraint.unit, masked=measurer.masked, **settings))


def _pass(
    windows: Windows, parts: Parts, measurer: Measurer, name: str, count: _Count, batch_tokens: int | None
) -> None:
    """One pass over the data; windows that were measured before are skipped, with their batch budget."""
    measurer.batch_tokens = batch_tokens
    for number, role, examples in windows.examples():
        if parts.has(name, number):
            measurer.batch_tokens = int(parts.facts(name, number)["batch_tokens"])
            count((2 if name == "both" else 1) * len(examples))
            continue
        encoded = windows.encode(examples, _side(name))
        if name == "both":
            columns = measurer.both(encoded, lambda n: count(2 * n))
        else:
            columns = measurer.side(_side(name), encoded, count)
        described = _described(examples, encoded, role, measurer.first_k) if name != "after" else {}
        truncated = {"truncated": np.array([item.truncated for item in encoded])}
        facts = {"batch_tokens": measurer.batch_tokens, "dtype": measurer.pair.dtype}
        parts.write(name, number, {**described, **truncated, **columns}, facts)


def _described(examples: list[Example], encoded: list[Encoded], role: str, first_k: int) -> dict[str, Any]:
    tokens = np.array([item.n_labels for item in encoded], dtype=np.int32)
    return {
        "id": [example.id for example in examples],
        "role": [role] * len(examples),
        "category": [example.category for example in examples],
        "tokens": tokens,
        "first_tokens": np.minimum(tokens, first_k).astype(np.int32),
    }


def finished_columns(parts: Parts, number: int, *, own: bool) -> dict[str, Any]:
    """One window of the finished table, degradations included; `violated` is not in it."""
    if parts.has("both", number):
        columns = parts.read("both", number)
    else:
        before, after = parts.read("before", number), parts.read("after", number)
        columns = before | after | {"truncated": before["truncated"] | after["truncated"]}
    kl = columns.pop("kl", None)
    losses = ("tokens", "first_tokens", "nll_before", "nll_after", "first_before", "first_after")
    measured = Measured(**{name: columns[name] for name in losses}, kl=kl, own=own)
    defined = ["nll_sum"] if own else [unit for unit in UNITS if unit != "kl_token" or kl is not None]
    if own:
        columns |= {"first_before": None, "first_after": None}
    return columns | {unit: measured.degradation(unit) if unit in defined else None for unit in UNITS}


class _Count:
    """Adds up what is done and tells the listener."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def __call__(self, n: int) -> None:
        self.done += n
        if self.progress is not None:
            self.progress(self.done, self.total)
