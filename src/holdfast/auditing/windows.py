"""The measuring of an audit, window by window: read, encode, run, store; memory does not grow with the data.

On a fast GPU encoding takes a quarter of the time of the forward passes. A thread does not hide it: what it holds of
the interpreter's lock, the launching of kernels waits for. A launch, however, returns before its kernels have run, and
in the gap until the device needs more the host encodes the same share of the next window as it has handed over of this
one.
"""

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from holdfast.auditing import measure
from holdfast.auditing.endpoint import EndpointLaunch
from holdfast.auditing.measure import Count, Launch, Measurer, PassName, Progress, counter
from holdfast.auditing.pair import NAMES, Name, Pair
from holdfast.auditing.partial_results import PartialResults
from holdfast.auditing.scoring import INERT
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
    """Some examples of one role; `encoded` has this process's share of them, and is empty where none are wanted."""

    number: int
    role: str
    size: int
    examples: list[Example] = field(default_factory=list)
    encoded: list[Encoded] = field(default_factory=list)


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
        self._reading = {role: iter(stream) for role, stream in streams.items()}
        windows = [Window(number, role, n) for number, (role, n) in enumerate(layout(streams, size))]
        self._last = {window.role: window.number for window in windows}
        self._windows = iter(windows)
        self._taken: Window | None = None
        self._next = next(self._windows, None)
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Window]:
        while (window := self.take()) is not None:
            yield window

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
        window = self._next
        if window is None or self._error is not None:
            return
        missing = min(window.size, math.ceil(share * window.size)) - len(window.examples)
        if missing <= 0:
            return
        try:
            more = list(islice(self._reading[window.role], missing))
            if self._wanted(window.number):
                window.encoded += self._encode(self._sharing.own(more, start=len(window.examples)))
            window.examples += more
            if len(window.examples) == window.size and window.number == self._last[window.role]:
                next(self._reading[window.role], None)  # where the stream sees whether its source has changed
        except Exception as error:  # noqa: BLE001  (raised by `take`)
            self._error = error


class Windows:
    """The data of an audit: `n` examples, cut into `count` windows that are measured one after the other."""

    def __init__(
        self, streams: Mapping[str, ExampleStream], pair: Pair, *, max_length: int | None, sharing: Sharing = ALONE
    ) -> None:
        self.streams, self.pair, self.max_length, self.size = streams, pair, max_length, WINDOW
        self.sharing = sharing
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
    measurer = Measurer(windows.pair, first_k=constraint.first_k, kl=kl, batch_tokens=batch_tokens)
    names: tuple[PassName, ...] = ("both",) if measurer.joint else NAMES
    count = counter(progress, 2 * windows.n)
    for name in names:
        measurer.batch_tokens = batch_tokens
        with gc_frozen():
            _Pass(windows, parts, measurer, name, constraint.unit).run(count)
        if name in windows.pair.served and windows.sharing.leads:
            _require_same_model(windows, parts, measurer, name)
        if not windows.pair.together:
            windows.pair.release("after" if name == "after" else "before")


def require_served(windows: Windows, first_k: int) -> None:
    """Ask every endpoint for one example: what it cannot do shows before anything is measured."""
    for name in windows.pair.served:
        Measurer(windows.pair, first_k=first_k, kl=False).launch(name, windows.encode(windows.sampled[:1], name))


def _require_same_model(windows: Windows, parts: PartialResults, measurer: Measurer, name: PassName) -> None:
    """Ask for the first example once more: a server may have been given another model since, also between two starts.

    `INERT` is what rounding is allowed to do.
    """
    side: Name = "after" if name == "after" else "before"
    item = windows.encode([next(iter(next(iter(windows.streams.values()))))], side)[0]
    again = measurer.launch(name, [item]).columns()[f"nll_{side}"][0]
    gap = abs(again - parts.read(name, 0)[f"nll_{side}"][0]) / item.n_labels
    if not gap <= INERT[False]:
        raise CheckpointError(
            f"{windows.pair.ref(side).ref} answers otherwise than when this audit began: the first example's loss "
            f"moved by {gap:.3g} nats per token, so its model was changed",
            remedy=f"delete {parts.folder} and audit again",
        )


class _Pass:
    """One pass over the data: through both models, or through one.

    A window's results are stored when the next one has been launched, so the device has work throughout. The first pass
    measures the noise floor too: the windows' own losses of a sample against a second pass over it.
    """

    def __init__(self, windows: Windows, parts: PartialResults, measurer: Measurer, name: PassName, unit: str) -> None:
        self.windows, self.parts, self.measurer, self.name, self.unit = windows, parts, measurer, name, unit
        self.side: Name = "after" if name == "after" else "before"
        self.noise = name != "after" and windows.sharing.leads and parts.noise() is None
        self.sampled = {example.id for example in windows.sampled} if self.noise else set()
        self.first: dict[str, tuple[float, float]] = {}  # total and first-k loss of these examples, by id
        self.again: Launch | EndpointLaunch | None = None

    def run(self, count: Count) -> None:
        windows, parts, measurer, name = self.windows, self.parts, self.measurer, self.name
        sharing = windows.sharing  # what was measured before an interruption, the first process knows
        measured = sharing.first(lambda: [parts.has(name, number) for number in range(windows.count)])
        if self.noise or not all(measured):
            measurer.check(name, windows.encode(windows.sampled[:1], self.side)[0])
        own = count if sharing.world == 1 else None  # of several processes each counts the others' examples too
        prefetcher = windows.prefetcher(self.side, lambda number: not measured[number])
        store: Callable[[], None] | None = None
        for window in prefetcher:
            if measured[window.number]:  # its budget is kept
                if sharing.leads:
                    measurer.batch_tokens = int(parts.facts(name, window.number)["batch_tokens"])
                count(window.size * (2 if name == "both" else 1))
                continue
            gap = partial(self._in_gap, prefetcher)
            # More processes than examples leave some without any.
            launched = measurer.launch(name, window.encoded, own, gap) if window.encoded else None
            if own is None:
                count(window.size * (2 if name == "both" else 1))
            if store is not None:
                store()
            facts = {"batch_tokens": measurer.batch_tokens, "dtype": measurer.pair.dtype}
            store = partial(self._store, window, launched, facts)
            if name in windows.pair.served:  # its results are here already, and a server may fail at any time
                store()
                store = None
        again = self._second_pass()
        if again is not None:
            again.finish()
        if store is not None:
            store()
        if again is not None:
            for number in np.flatnonzero(measured):
                self._keep(parts.read(name, int(number)))
            parts.write_noise(measure.floor_between(self.first, again, self.unit))
        elif self.noise:
            parts.write_noise(measure.noise_floor(measurer, windows.encode(windows.sampled, "before"), self.unit))

    def _in_gap(self, prefetcher: WindowPrefetcher, share: float) -> None:
        """While the device works: encode ahead, and where that leaves time launch a batch of the second pass."""
        prefetcher.advance(share)
        if not prefetcher.growing and (again := self._second_pass()) is not None:
            again.step()

    def _second_pass(self) -> Launch | EndpointLaunch | None:
        """Begun where it is first asked for: to encode its examples takes a while."""
        if self.again is None and self.noise and self.unit not in KL_UNITS:
            self.again = measure.second_pass(self.measurer, self.windows.encode(self.windows.sampled, "before"))
        return self.again

    def _store(self, window: Window, launched: Launch | EndpointLaunch | None, facts: dict[str, Any]) -> None:
        columns: dict[str, Any] = {"truncated": np.array([item.truncated for item in window.encoded], dtype=bool)}
        if self.name != "after":
            tokens = np.array([item.n_labels for item in window.encoded], dtype=np.int32)
            first = np.minimum(tokens, self.measurer.first_k).astype(np.int32)
            columns |= {"tokens": tokens, "first_tokens": first}
        columns |= {} if launched is None else launched.columns()
        columns = self.windows.sharing.together(columns)
        if not self.windows.sharing.leads:
            return
        if self.name != "after":
            columns |= {
                "id": [example.id for example in window.examples], "role": [window.role] * window.size,
                "category": [example.category for example in window.examples],
            }  # fmt: skip
        self.parts.write(self.name, window.number, columns, facts)
        self._keep(columns)

    def _keep(self, columns: Mapping[str, Any]) -> None:
        if self.sampled:
            rows = zip(columns["id"], columns["nll_before"], columns["first_before"], strict=True)
            self.first |= {name: (total, first) for name, total, first in rows if name in self.sampled}
