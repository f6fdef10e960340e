"""Windows of examples, the next one read and encoded a piece at a time while the device works on the one before.

On a fast GPU encoding takes a quarter of the time of the forward passes. A thread does not hide it: what it holds of
the interpreter's lock, the launching of kernels waits for. A launch, however, returns before its kernels have run, and
in the gap until the device needs more the host encodes the same share of the next window as it has handed over of this
one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from holdfast.data.encode import Encoded
from holdfast.data.examples import Example
from holdfast.data.stream import ExampleStream

FIRST = 256  # long enough on a fast device to launch it and to encode twice as many meanwhile


@dataclass
class Window:
    """Some examples of one role; `encoded` stays empty where their tokens are not wanted."""

    number: int
    role: str
    size: int
    examples: list[Example] = field(default_factory=list)
    encoded: list[Encoded] = field(default_factory=list)


def layout(streams: Mapping[str, ExampleStream], size: int) -> list[tuple[str, int]]:
    """Role and size of every window: `size`, after a few smaller ones at the start, where the device has to wait.

    What is left for the last two is halved: a window of a few examples takes as long to launch as a large one.
    """
    windows = []
    following = min(FIRST, size)
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

    Args:
        streams: the examples by role.
        size: of a window.
        encode: tokens of examples.
        wanted: whether a window is to be encoded; examples of others are read only.
    """

    def __init__(
        self,
        streams: Mapping[str, ExampleStream],
        size: int,
        encode: Callable[[list[Example]], list[Encoded]],
        wanted: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._encode, self._wanted = encode, wanted
        self._reading = {role: iter(stream) for role, stream in streams.items()}
        self._layout = layout(streams, size)
        self._last = {role: number for number, (role, _) in enumerate(self._layout)}
        self._next = self._window(0)
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Window]:
        while (window := self.take()) is not None:
            yield window

    def _window(self, number: int) -> Window | None:
        return Window(number, *self._layout[number]) if number < len(self._layout) else None

    def take(self) -> Window | None:
        """The next window, finished; None after the last. A fault of its data is raised here."""
        window = self._next
        if window is None:
            return None
        self.advance(1.0)
        if self._error is not None:
            raise self._error
        self._next = self._window(window.number + 1)
        return window

    @property
    def growing(self) -> bool:
        """Whether the window in preparation is larger than the one taken last: the host has no time to spare."""
        following = self._next
        return following is not None and following.number > 0 and following.size > self._layout[following.number - 1][1]

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
                window.encoded += self._encode(more)
            window.examples += more
            if len(window.examples) == window.size and window.number == self._last[window.role]:
                next(self._reading[window.role], None)  # where the stream sees whether its source has changed
        except Exception as error:  # noqa: BLE001  (raised by `take`)
            self._error = error
