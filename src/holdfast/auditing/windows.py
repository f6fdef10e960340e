"""The measuring of an audit, window by window: read, encode, run, store; memory does not grow with the data.

On a fast GPU encoding takes a quarter of the time of the forward passes. A thread does not hide it: what it holds of
the interpreter's lock, the launching of kernels waits for. A launch, however, returns before its kernels have run, and
in the gap until the device needs more the host encodes of the next window the share that it has handed over of this.
"""

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any

import numpy as np

from holdfast.auditing.batches import INERT
from holdfast.auditing.endpoint import EndpointLaunch
from holdfast.auditing.measure import (
    Count,
    Launch,
    Measurer,
    Progress,
    Sides,
    counter,
    floor_between,
    noise_floor,
    second_pass,
)
from holdfast.auditing.pair import NAMES, Name, Pair
from holdfast.auditing.results import PartialResults
from holdfast.auditing.sharing import ALONE, Sharing
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import CheckpointError, DataError
from holdfast.core.units import KL_UNITS
from holdfast.data.encode import Encoded, encode_all, require_usable_tokenizer
from holdfast.data.examples import Example
from holdfast.data.stream import ExampleStream

WINDOW = 1024
FIRST = 256  # long enough on a fast device to launch it and to encode twice as many meanwhile


@dataclass
class Window:
    """Some examples of one role; of this process's share what is wanted is encoded and launched."""

    number: int
    role: str
    size: int
    examples: list[Example] = field(default_factory=list)
    encoded: list[Encoded] = field(default_factory=list)
    launched: Launch | EndpointLaunch | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # how they are measured


def layout(streams: Mapping[str, ExampleStream], size: int) -> list[tuple[str, int]]:
    """Role and size of every window: `size`, after a few smaller ones at the start, where the device has to wait.

    What is left for the last two is halved: a window of a few examples takes as long to launch as a large one.
    """
    windows, following = [], min(FIRST, size)
    for role, stream in streams.items():
        left = stream.n
        while left:
            taken = -(-left // 2) if following < left < 2 * following else min(following, left)
            windows.append((role, taken))
            left -= taken
            following = min(2 * following, size)
    return windows


class WindowPrefetcher:
    """The windows in order; `take` gives one, `advance` works on the one after it.

    Windows that are not `wanted`, by their number, are read but not encoded.
    """

    def __init__(
        self, streams: Mapping[str, ExampleStream], size: int, encode: Callable[[list[Example]], list[Encoded]],
        wanted: Callable[[int], bool] = lambda _: True, sharing: Sharing = ALONE,
    ) -> None:  # fmt: skip
        self._encode, self._wanted, self._sharing = encode, wanted, sharing
        self._examples = chain.from_iterable(streams.values())
        self._windows = iter([Window(number, role, n) for number, (role, n) in enumerate(layout(streams, size))])
        self._taken: Window | None = None
        self._next = next(self._windows, None)
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Window]:
        yield from iter(self.take, None)
        next(self._examples, None)  # where the last stream sees whether its source has changed

    def take(self) -> Window | None:
        """The next window, finished; None after the last. A fault of its data is raised here."""
        self.advance(1.0)
        if self._error is not None:
            raise self._error
        self._taken, self._next = self._next, next(self._windows, None)
        return self._taken

    @property
    def growing(self) -> bool:
        """Whether the window in preparation is larger than the one taken last: the host has no time to spare."""
        return self._taken is not None and self._next is not None and self._next.size > self._taken.size

    def advance(self, share: float) -> None:
        """Read and encode up to this share of the next window; its faults wait until it is taken."""
        if (window := self._next) is None or self._error is not None:
            return
        missing = min(window.size, math.ceil(share * window.size)) - len(window.examples)
        try:
            if more := list(islice(self._examples, max(0, missing))):
                if self._wanted(window.number):
                    window.encoded += self._encode(self._sharing.own(more, start=len(window.examples)))
                window.examples += more
        except Exception as error:  # noqa: BLE001  (raised by `take`)
            self._error = error


class Windows:
    """The data of an audit: `n` examples, cut into `count` windows that are measured one after the other."""

    def __init__(
        self, streams: Mapping[str, ExampleStream], pair: Pair, *, max_length: int | None, sharing: Sharing = ALONE
    ) -> None:
        self.streams, self.pair, self.max_length, self.size, self.sharing = streams, pair, max_length, WINDOW, sharing
        self.count = len(layout(streams, self.size))
        self.n = sum(stream.n for stream in streams.values())
        chat = any(stream.chat for stream in streams.values())
        for name in NAMES if pair.tokenizers.own else NAMES[:1]:
            require_usable_tokenizer(pair.tokenizers.of(name), needs_chat=chat)

    def prefetcher(self, name: Name, wanted: Callable[[int], bool] = lambda _: True) -> WindowPrefetcher:
        """All windows as one side reads them."""
        return WindowPrefetcher(self.streams, self.size, partial(self.encode, name=name), wanted, self.sharing)

    def encode(self, examples: list[Example], name: Name) -> list[Encoded]:
        tokenizer = self.pair.tokenizers.of(name)
        try:
            return encode_all(examples, tokenizer, max_length=self.max_length, role="safety").examples
        except DataError as error:
            raise DataError(error.what, remedy="raise max_length, or shorten or remove these examples") from None

    @property
    def sampled(self) -> list[Example]:
        """Examples with the smallest ids, which are hashes, in their order."""
        return sorted((e for stream in self.streams.values() for e in stream.sample), key=lambda e: e.id)


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Leave all present objects out of garbage collections, unless the heap's owner has frozen it already.

    Encoding makes many small lists, so Python looks for cycles again and again, now and then among the several hundred
    thousand objects of torch and transformers, while the device waits.
    """
    ours = not gc.get_freeze_count()
    if ours:
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()


def measure_windows(
    windows: Windows, parts: PartialResults, constraint: ChanceConstraint, *, kl: bool | None,
    batch_tokens: int | None, progress: Progress | None,
) -> None:  # fmt: skip
    """Measure every window that has no part yet; in one pass for both models, or in one for each."""
    pair, measurer = windows.pair, Measurer(windows.pair, first_k=constraint.first_k, kl=kl)
    count = counter(progress, 2 * windows.n)
    for sides in measurer.passes:
        measurer.batch_tokens = batch_tokens
        with gc_frozen():
            _Pass(windows, parts, measurer, sides, constraint.unit).run(count)
        if sides[0] in pair.served and windows.sharing.leads:
            _require_same_model(windows, parts, measurer, sides[0])
        pair.leave(sides[0])


def require_served(windows: Windows, first_k: int) -> None:
    """Ask every endpoint for one example: what it cannot do shows before anything is measured."""
    for side in windows.pair.served:
        Measurer(windows.pair, first_k=first_k, kl=False).launch((side,), windows.encode(windows.sampled[:1], side))


def _require_same_model(windows: Windows, parts: PartialResults, measurer: Measurer, side: Name) -> None:
    """Ask for the first example once more: a server may have been given another model since, also between two starts.

    `INERT` is what rounding is allowed to do.
    """
    item = windows.encode([next(iter(next(iter(windows.streams.values()))))], side)[0]
    again = measurer.launch((side,), [item]).columns()[f"nll_{side}"][0]
    gap = abs(again - parts.read(side, 0)[f"nll_{side}"][0]) / item.n_labels
    if not gap <= INERT[False]:
        raise CheckpointError(
            f"{windows.pair.ref(side).ref} answers otherwise than when this audit began: the first example's loss "
            f"moved by {gap:.3g} nats per token, so its model was changed",
            remedy=f"delete {parts.folder} and audit again",
        )


class _Pass:
    """One pass over the data: through both models, or through one; the first measures the noise floor too."""

    def __init__(self, windows: Windows, parts: PartialResults, measurer: Measurer, sides: Sides, unit: str) -> None:
        self.windows, self.parts, self.measurer, self.sides, self.unit = windows, parts, measurer, sides, unit
        self.sharing, self.name = windows.sharing, sides[0] if len(sides) == 1 else "both"
        self.noise = "before" in sides and self.sharing.leads and parts.noise() is None
        self.sampled = {example.id for example in windows.sampled}
        self.first: dict[str, tuple[float, float]] = {}  # total and first-k loss of these examples, by id

    def run(self, count: Count) -> None:
        """Launch and store the windows, each stored when the next one is launched: the device has work throughout."""
        windows, parts = self.windows, self.parts
        # What was measured before an interruption, the first process knows.
        stored = self.sharing.first(lambda: [parts.has(self.name, number) for number in range(windows.count)])
        if self.noise or not all(stored):
            self.measurer.check(self.sides, windows.encode(windows.sampled[:1], self.sides[0])[0])
        ahead = 0 if self.sides[0] in windows.pair.served else 1  # a server may fail, and its results are here already
        waiting: list[Window] = []
        for window in self._launched(stored, count):
            waiting.append(window)
            if len(waiting) > ahead:
                self._store(waiting.pop(0))
        for window in waiting:
            self._store(window)
        if self.noise:
            for number in np.flatnonzero(stored):
                self._keep(parts.read(self.name, int(number)))
            if self.second is not None:
                parts.write_noise(floor_between(self.first, self.second, self.unit))
            else:
                parts.write_noise(noise_floor(self.measurer, windows.encode(windows.sampled, "before"), self.unit))

    @cached_property
    def second(self) -> Launch | EndpointLaunch | None:
        """The noise floor's second pass, begun where it is first asked for: to encode its examples takes a while."""
        if not self.noise or self.unit in KL_UNITS:
            return None
        return second_pass(self.measurer, self.windows.encode(self.windows.sampled, "before"))

    def _launched(self, stored: list[bool], count: Count) -> Iterator[Window]:
        """The windows that are not stored, handed to the device; then what is left of the noise floor's pass."""
        measurer, prefetcher = self.measurer, self.windows.prefetcher(self.sides[0], lambda number: not stored[number])
        own = count if self.sharing.world == 1 else None  # of several processes each counts the others' examples too

        def in_gap(share: float) -> None:
            prefetcher.advance(share)
            if not prefetcher.growing and self.second is not None:
                self.second.step()

        for window in prefetcher:
            if stored[window.number] or own is None:
                count(window.size * len(self.sides))
            if not stored[window.number]:
                if window.encoded:  # more processes than examples leave some without any
                    window.launched = measurer.launch(self.sides, window.encoded, own, in_gap)
                window.facts = {"batch_tokens": measurer.batch_tokens, "dtype": measurer.pair.dtype}
                yield window
            elif self.sharing.leads:  # its budget is kept
                measurer.batch_tokens = int(self.parts.facts(self.name, window.number)["batch_tokens"])
        if self.second is not None:
            self.second.finish()

    def _store(self, window: Window) -> None:
        columns: dict[str, Any] = {}
        if window.launched is not None:
            columns = {"truncated": np.array([item.truncated for item in window.encoded]), **window.launched.columns()}
        columns = self.sharing.together(columns)
        if not self.sharing.leads:
            return
        if "before" in self.sides:
            columns |= {name: [getattr(example, name) for example in window.examples] for name in ("id", "category")}
            columns["role"] = [window.role] * window.size
        self.parts.write(self.name, window.number, columns, window.facts)
        if self.noise:
            self._keep(columns)

    def _keep(self, columns: Mapping[str, Any]) -> None:
        rows = zip(columns["id"], columns["nll_before"], columns["first_before"], strict=True)
        self.first |= {name: (total, first) for name, total, first in rows if name in self.sampled}
