"""The measuring of an audit, window by window: read, encode, run, store; memory does not grow with the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

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
T = TypeVar("T")


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

    def sample(self) -> list[Encoded]:
        """The examples for the noise floor, as `before` reads them."""
        chosen = sorted((e for stream in self.streams.values() for e in stream.sample), key=lambda e: e.id)
        return self.encode(chosen, "before")


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
    sample = windows.sample()
    for name in names:
        if parts.done(name, windows.count) < windows.count:
            side: Name = "after" if name == "after" else "before"
            example = sample if side == "before" else windows.encode(_first(windows), "after")
            for checked in NAMES if name == "both" else (side,):
                measurer.check(checked, example[0])
        if name != "after" and parts.noise() is None:
            floor = noise_floor(pair, sample, constraint.unit, first_k=constraint.first_k, batch_tokens=batch_tokens)
            parts.write_noise(floor)
        _pass(windows, parts, measurer, name, count, batch_tokens)
        if not pair.together:
            pair.release(name)


def _first(windows: Windows) -> list[Example]:
    return [next(iter(windows.examples()))[2][0]]


def _pass(
    windows: Windows, parts: Parts, measurer: Measurer, name: Any, count: _Count, batch_tokens: int | None
) -> None:
    """One pass over the data; windows that were measured before are skipped, with their batch budget."""
    measurer.batch_tokens = batch_tokens
    weight = 2 if name == "both" else 1
    side: Name = "after" if name == "after" else "before"

    def prepare(item: tuple[int, str, list[Example]]) -> tuple[int, str, list[Example], list[Encoded] | None]:
        number, role, examples = item
        return number, role, examples, None if parts.has(name, number) else windows.encode(examples, side)

    for number, role, examples, encoded in _ahead(windows.examples(), prepare):
        if encoded is None:
            measurer.batch_tokens = int(parts.facts(name, number)["batch_tokens"])
            count(weight * len(examples))
            continue
        if name == "both":
            columns = measurer.both(encoded, lambda n: count(2 * n))
        else:
            columns = measurer.side(side, encoded, count)
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


def _ahead(items: Iterator[Any], prepare: Callable[[Any], T]) -> Iterator[T]:
    """Prepare the next item while the caller works on this one."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting = None
        for item in items:
            following = pool.submit(prepare, item)
            if waiting is not None:
                yield waiting.result()
            waiting = following
        if waiting is not None:
            yield waiting.result()


class _Count:
    """Adds up what is done and tells the listener."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def __call__(self, n: int) -> None:
        self.done += n
        if self.progress is not None:
            self.progress(self.done, self.total)
