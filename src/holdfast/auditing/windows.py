"""The measuring of an audit, window by window: read, encode, run, store; memory does not grow with the data."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from holdfast.auditing.measure import Collect, Count, Launch, Measured, Measurer, PassName, Progress, counter
from holdfast.auditing.noise import floor_between, noise_floor, second_pass
from holdfast.auditing.pair import NAMES, Name, Pair
from holdfast.auditing.partial_results import PartialResults
from holdfast.auditing.window_prefetcher import Window, WindowPrefetcher, layout
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
        self.streams, self.pair, self.max_length, self.size = streams, pair, max_length, WINDOW
        self.count = len(layout(streams, self.size))
        self.n = sum(stream.n for stream in streams.values())
        for name in NAMES if pair.tokenizers.own else NAMES[:1]:
            chat = any(stream.chat for stream in streams.values())
            require_usable_tokenizer(pair.tokenizers.of(name), needs_chat=chat)

    def prefetcher(self, name: Name, wanted: Callable[[int], bool] = lambda _: True) -> WindowPrefetcher:
        """All windows as one side reads them; those that are not wanted without tokens."""
        return WindowPrefetcher(self.streams, self.size, lambda examples: self.encode(examples, name), wanted)

    def encode(self, examples: list[Example], name: Name) -> list[Encoded]:
        """Tokens for one side."""
        tokenizer = self.pair.tokenizers.of(name)
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


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Leave all present objects out of garbage collections; new ones are still collected.

    Encoding makes many small lists, so Python looks for cycles again and again, now and then among the several hundred
    thousand objects of torch and transformers, while the device waits. A heap that its owner has frozen already stays
    as it is: thawing it would undo that.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def measure_windows(
    windows: Windows,
    parts: PartialResults,
    constraint: ChanceConstraint,
    *,
    kl: bool | None,
    batch_tokens: int | None,
    progress: Progress | None,
) -> None:
    """Measure every window that has no part yet; in one pass for both models, or in one for each."""
    measurer = Measurer(windows.pair, first_k=constraint.first_k, kl=kl, batch_tokens=batch_tokens)
    names: tuple[PassName, ...] = ("both",) if measurer.joint else NAMES
    count = counter(progress, 2 * windows.n)
    for name in names:
        measurer.batch_tokens = batch_tokens
        measuring = _Pass(windows, parts, measurer, name, constraint.unit)
        with gc_frozen():
            measuring.run(count)
        if not windows.pair.together:
            windows.pair.release(measuring.side)


class _Pass:
    """One pass over the data: through both models, or through one.

    A window's results are stored when the next one has been launched, so the device has work throughout. The first pass
    measures the noise floor too: the windows' own losses of a sample against a second pass over it.
    """

    def __init__(self, windows: Windows, parts: PartialResults, measurer: Measurer, name: PassName, unit: str) -> None:
        self.windows, self.parts, self.measurer, self.name, self.unit = windows, parts, measurer, name, unit
        self.side: Name = "after" if name == "after" else "before"
        self.noise = name != "after" and parts.noise() is None
        self.again: Launch | None = None
        self.sampled = {example.id for example in windows.sampled} if self.noise else set()
        self.first: dict[str, tuple[float, float]] = {}  # total and first-k loss of these examples, by id

    def run(self, count: Count) -> None:
        """Measure the windows that have no part yet, and the noise floor with the first of them."""
        windows, parts, measurer, name = self.windows, self.parts, self.measurer, self.name
        prefetcher = windows.prefetcher(self.side, lambda number: not parts.has(name, number))
        if self.noise or not all(parts.has(name, number) for number in range(windows.count)):
            measurer.check(name, windows.sample(self.side, 1)[0])
        factor = 2 if name == "both" else 1
        earlier: list[int] = []  # windows measured before an interruption
        waiting: Callable[[], None] | None = None
        for window in prefetcher:
            if parts.has(name, window.number):  # its budget is kept
                measurer.batch_tokens = int(parts.facts(name, window.number)["batch_tokens"])
                count(factor * window.size)
                earlier.append(window.number)
                continue
            gap = partial(self._in_gap, prefetcher)
            collect = measurer.launch(name, window.encoded, lambda n: count(factor * n), gap)
            if waiting is not None:
                waiting()
            facts = {"batch_tokens": measurer.batch_tokens, "dtype": measurer.pair.dtype}
            waiting = partial(self._store, window, collect, facts)
        again = self._second()
        if again is not None:
            again.finish()
        if waiting is not None:
            waiting()
        if again is not None:
            for number in earlier:
                self._keep(parts.read(name, number))
            parts.write_noise(floor_between(self.first, again, self.unit))
        elif self.noise:
            parts.write_noise(noise_floor(measurer, windows.sample("before"), self.unit))

    def _in_gap(self, prefetcher: WindowPrefetcher, share: float) -> None:
        """While the device works: encode ahead, and where that leaves time launch a batch of the second pass."""
        prefetcher.advance(share)
        if not prefetcher.growing and (again := self._second()) is not None:
            again.step()

    def _second(self) -> Launch | None:
        """The second pass, begun where it is first asked for: to encode its examples takes a while."""
        if self.again is None and self.noise and self.unit != "kl_token":
            self.again = second_pass(self.measurer, self.windows.sample("before"))
        return self.again

    def _store(self, window: Window, collect: Collect, facts: dict[str, Any]) -> None:
        """Wait for a window's results and write its part."""
        columns: dict[str, Any] = {"truncated": np.array([item.truncated for item in window.encoded])}
        if self.name != "after":
            tokens = np.array([item.n_labels for item in window.encoded], dtype=np.int32)
            columns |= {
                "id": [example.id for example in window.examples], "role": [window.role] * window.size,
                "category": [example.category for example in window.examples], "tokens": tokens,
                "first_tokens": np.minimum(tokens, self.measurer.first_k).astype(np.int32),
            }  # fmt: skip
        columns |= collect()
        self.parts.write(self.name, window.number, columns, facts)
        self._keep(columns)

    def _keep(self, columns: Mapping[str, Any]) -> None:
        if self.sampled:
            rows = zip(columns["id"], columns["nll_before"], columns["first_before"], strict=True)
            self.first |= {name: (total, first) for name, total, first in rows if name in self.sampled}


def finished_columns(parts: PartialResults, number: int, *, own: bool) -> dict[str, Any]:
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
