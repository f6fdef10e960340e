"""Live progress of a measurement: a bar with ETA on a terminal, about ten plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.cli.terminal import duration, note

LINES = 10
FORWARD = "forward passes"
"""What a measurement counts: each example once a model."""


@contextmanager
def show_count(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A function of (done, total) that shows on stderr how far the work is, while the context is open.

    Args:
        what: the work.
        unit: what is counted.
    """
    if not sys.stderr.isatty():
        yield _plain(what, unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    count = (MofNCompleteColumn(), TextColumn(unit))
    columns = (TextColumn(what), BarColumn(bar_width=24), *count, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _plain(what: str, unit: str) -> Callable[[int, int], None]:
    start, shown = time.monotonic(), 0

    def show(done: int, total: int) -> None:
        nonlocal start, shown
        if done < shown:  # the next of several passes
            start, shown = time.monotonic(), 0
        if done == total or done - shown >= total / LINES:
            shown = done
            left = (time.monotonic() - start) / done * (total - done)
            note(f"{what} {done}/{total} {unit}  eta {duration(left)}")

    return show
