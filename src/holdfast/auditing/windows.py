"""The measuring of an audit, window by window: read, encode, run, store; memory does not grow with the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from holdfast.auditing.ahead import Ahead, Window, layout
from holdfast.auditing.heap import heap_set_aside
from holdfast.auditing.measure import Collect, Measured, Measurer, PassName, Progress
from holdfast.auditing.noise import SecondPass, SecondRun, noise_floor
from holdfast.auditing.pair import NAMES, Name, Pair
from holdfast.auditing.parts import Parts
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import DataError
from holdfast.data.encode import Encoded, encode_all, require_usable_tokenizer
from holdfast.data.examples import Example
from holdfast.data.stream import ExampleStream
from holdfast.records.audit_figures import UNITS

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
        self.count = len(layout(streams, self.size))
        self.n = sum(stream.n for stream in streams.values())
        for tokenizer in {id(t): t for t in (pair.tokenizers.before, pair.tokenizers.after)}.values():
            require_usable_tokenizer(tokenizer, needs_chat=any(stream.chat for stream in streams.values()))

    def ahead(self, name: Name, wanted: Callable[[int], bool] = lambda _: True) -> Ahead:
        """All windows as one side reads them; those that are not wanted without tokens."""
        return Ahead(self.streams, self.size, lambda examples: self.encode(examples, name), wanted)

    def encode(self, examples: list[Example], name: Name) -> list[Encoded]:
        """Tokens for one side."""
        tokenizer = self.pair.tokenizers.before if name == "before" else self.pair.tokenizers.after
        try:
            return encode_all(examples, tokenizer, max_length=self.max_length, role="safety").examples
        except DataError as error:
            raise DataError(error.what, remedy="raise max_length, or shorten or remove these examples") from None

    @property
    def sampled(self) -> list[Example]:
        """Examples with the smallest ids, which are hashes, in their order."""
        return sorted((e for stream in self.streams.values() for e in stream.sample), key=lambda e: e.id)

    def sample(self, name: Name, most: int | None = None) -> list[Encoded]:
        """These examples as one side reads them; `most` of them, or all there are."""
        return self.encode(self.sampled[:most], name)


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
    names: tuple[PassName, ...] = ("both",) if measurer.joint else NAMES
    count = _Count(progress, 2 * windows.n)
    for name in names:
        with heap_set_aside():
            _Pass(windows, parts, measurer, name, constraint, batch_tokens).run(count)
        if not pair.together:
            pair.release(_side(name))


def _side(name: str) -> Name:
    return "after" if name == "after" else "before"


class _Pass:
    """One pass over the data: through both models, or through one.

    A window's results are stored when the next one has been launched, so the device has work throughout.
    """

    def __init__(
        self, windows: Windows, parts: Parts, measurer: Measurer, name: PassName, constraint: ChanceConstraint,
        batch_tokens: int | None,
    ) -> None:  # fmt: skip
        self.windows, self.parts, self.measurer, self.name = windows, parts, measurer, name
        self.unit = constraint.unit
        self.settings: dict[str, Any] = {"first_k": constraint.first_k, "batch_tokens": batch_tokens}
        self.noise = name != "after" and parts.noise() is None
        self.again: SecondRun | None = None
        self.sampled = {example.id for example in windows.sampled} if self.noise else set()
        self.first: dict[str, tuple[float, float]] = {}  # losses of these examples in the first pass
        self.earlier: list[int] = []  # windows measured before an interruption

    def run(self, count: _Count) -> None:
        """Measure the windows that have no part yet, and the noise floor with the first of them."""
        windows, parts, measurer, name = self.windows, self.parts, self.measurer, self.name
        ahead = windows.ahead(_side(name), lambda number: not parts.has(name, number))
        if self.noise or parts.done(name, windows.count) < windows.count:
            self._check()
        measurer.batch_tokens = self.settings["batch_tokens"]
        factor = 2 if name == "both" else 1
        waiting: Callable[[], None] | None = None
        for window in ahead:
            if parts.has(name, window.number):  # measured before an interruption; its budget is kept
                measurer.batch_tokens = int(parts.facts(name, window.number)["batch_tokens"])
                count(factor * window.size)
                self.earlier.append(window.number)
                continue
            gap = partial(self._in_gap, ahead)
            collect = measurer.launch(name, window.encoded, lambda n: count(factor * n), gap)
            if waiting is not None:
                waiting()
            facts = {"batch_tokens": measurer.batch_tokens, "dtype": measurer.pair.dtype}
            waiting = partial(self._store, window, collect, facts)
        second = self._second() if self.noise else None
        again = None if second is None else second.finish()
        if waiting is not None:
            waiting()
        if self.noise:
            self._write_noise(again)

    def _in_gap(self, ahead: Ahead, share: float) -> None:
        """While the device works: encode ahead, and where that leaves time launch a batch of the second pass."""
        ahead.advance(share)
        if self.noise and not ahead.growing and (second := self._second()) is not None:
            second.step()

    def _check(self) -> None:
        """Hold the models of this pass against one example."""
        example = self.windows.sample(_side(self.name), 1)[0]
        if self.name == "both":
            self.measurer.check_both(example)
        else:
            self.measurer.check(_side(self.name), example)

    def _store(self, window: Window, collect: Collect, facts: dict[str, Any]) -> None:
        """Wait for a window's results and write its part."""
        encoded = window.encoded
        described = _described(window, self.measurer.first_k) if self.name != "after" else {}
        truncated = {"truncated": np.array([item.truncated for item in encoded])}
        columns = {**described, **truncated, **collect()}
        self.parts.write(self.name, window.number, columns, facts)
        self._keep(columns)

    def _second(self) -> SecondRun | None:
        """The second pass, begun where it is first asked for; its examples are then encoded, which takes a while.

        None for kl_token, which compares distributions, and these the windows do not keep.
        """
        if self.again is None and self.unit != "kl_token":
            sample = self.windows.sample("before")
            self.again = SecondRun(self.measurer.pair, sample, masked=self.measurer.masked, **self.settings)
        return self.again

    def _write_noise(self, again: SecondPass | None) -> None:
        """The noise floor: the windows' own losses against a second pass over a sample of them."""
        if again is not None:
            for number in self.earlier:
                self._keep(self.parts.read(self.name, number))
            found = again.floor(self.first, self.unit)
        else:
            sample = self.windows.sample("before")
            found = noise_floor(self.measurer.pair, sample, self.unit, masked=self.measurer.masked, **self.settings)
        self.parts.write_noise(found)

    def _keep(self, columns: Mapping[str, Any]) -> None:
        """Remember total and first-k loss of `before` of the examples that may be in the second pass, by id."""
        if not self.sampled:
            return
        rows = zip(columns["id"], columns["nll_before"], columns["first_before"], strict=True)
        self.first |= {name: (total, first) for name, total, first in rows if name in self.sampled}


def _described(window: Window, first_k: int) -> dict[str, Any]:
    tokens = np.array([item.n_labels for item in window.encoded], dtype=np.int32)
    return {
        "id": [example.id for example in window.examples],
        "role": [window.role] * window.size,
        "category": [example.category for example in window.examples],
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
