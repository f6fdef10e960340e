"""Live progress of a run or a measurement: a bar with ETA on a terminal, about ten plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from holdfast.certification.kept import FIGURES, REFUSALS
from holdfast.cli.terminal import clean, duration, note
from holdfast.core.percent import percent

LINES = 10  # plain lines per run, about
QUIET = 5.0  # seconds between two plain lines about one thing that is asked, at least
FORWARD = "forward passes"  # what a measurement counts: each example once a model


def describe_row(row: Mapping[str, Any]) -> str:
    """One step in words: g of every constraint, whose limit is 0, and the loss, where known."""
    constraints = row.get("constraints") or {"": row}
    known = {name: values["g"] for name, values in constraints.items() if values.get("g") is not None}
    shown = ", ".join(clean(f"{name} {g:+.3f}".lstrip()) for name, g in known.items())
    parts = [f"g {shown}"] if shown else []
    if row.get("loss") is not None:
        parts.append(f"loss {row['loss']:.3f}")
    return "  ".join(parts)


def describe_behaviour(row: Mapping[str, Any]) -> str:
    """The behaviour monitor's figures in words."""
    return "  ".join(
        f"{FIGURES[name][0]} {percent(figure['share'])}{'' if figure['passed'] else ' (OVER the limit)'}"
        for name, figure in row["behaviour"].items()
        if figure["share"] is not None
    )


def refusals_kept(row: Mapping[str, Any]) -> str:
    """The refusals kept when the monitor last asked, as the beginning of a line."""
    figure = row["behaviour"].get(REFUSALS)
    return "" if figure is None or figure["share"] is None else f"{FIGURES[REFUSALS][0]} {percent(figure['share'])}  "


def eta(start: float, done: int, left: int) -> str:
    """The time left at the mean pace since `start`; one step may take minutes, so the last seconds have no pace."""
    return duration((time.monotonic() - start) / max(1, done) * left)


class PlainProgress:
    """Prints about ten lines over the run."""

    def __init__(self) -> None:
        self._what, self._kept = "", ""  # what is asked; how a line about a step begins
        self._total, self._first, self._start = 0, 0, time.monotonic()
        self._said, self._noted = 0, -QUIET  # tenths, and when there was a line about asking

    def __call__(self, row: Mapping[str, Any]) -> None:
        if row.get("stage") == "ask":
            self._asking(clean(row["what"]), row["done"], row["total"])
            return
        if "stage" in row:
            self._total, self._first, self._start = row["total_steps"], row["step"], time.monotonic()
            resumed = f", continuing after step {self._first}" if self._first else ""
            note(f"training: {self._total} steps{resumed}")
            return
        step, line = row["step"], f"step {row['step']}/{self._total}  "
        if row.get("asked") == 0:
            self._note(f"{line}asking {row['of']} monitor prompts")
        elif "asked" in row:  # they have no pace of their own in a line: how many are asked, now and then
            if row["asked"] < row["of"] and time.monotonic() - self._noted >= QUIET:
                self._note(f"{line}asked {row['asked']} of {row['of']} monitor prompts")
        elif "behaviour" in row:
            self._kept = refusals_kept(row)
            note(line + describe_behaviour(row))
        elif step in (self._first + 1, self._total) or step % max(1, self._total // LINES) == 0:
            pace = eta(self._start, step - self._first, self._total - step)
            note(f"{line}{self._kept}{describe_row(row)}  eta {pace}")

    def _asking(self, what: str, done: int, total: int) -> None:
        line, tenth = f"asking the model: {what}, {done} of {total}", done * LINES // max(1, total)
        if what != self._what:
            self._what, self._first, self._start = what, done, time.monotonic()
            self._said, self._noted = -1, -QUIET
            if done < total:  # how long it takes is known, and said, with the next batch
                note(line)
                return
        if done == total or (tenth > self._said and time.monotonic() - self._noted >= QUIET):
            self._said = tenth
            self._note(line if done == total else f"{line}  eta {eta(self._start, done - self._first, total - done)}")

    def _note(self, line: str) -> None:
        self._noted = time.monotonic()
        note(line)


class BarProgress:
    """Feeds one line of a rich progress bar: what goes on now, how far it is, the time left and the figures."""

    def __init__(self, bar: Any) -> None:
        self._bar, self._phase = bar, ""
        self._task: Any = None
        self._kept, self._steps = "", 0
        self._first, self._start = 0, time.monotonic()

    def __call__(self, row: Mapping[str, Any]) -> None:
        if row.get("stage") == "ask":
            self._show(f"asking: {clean(row['what'])}", row["done"], row["total"])
        elif "asked" in row:
            self._show("asking: monitor prompts", row["asked"], row["of"])
        else:
            self._steps = row.get("total_steps", self._steps)
            self._kept = refusals_kept(row) if "behaviour" in row else self._kept
            state = describe_behaviour(row) if "behaviour" in row else self._kept + describe_row(row)
            self._show("training", row["step"], self._steps, "" if "stage" in row else state)

    def _show(self, phase: str, done: int, total: int, state: str = "") -> None:
        """A phase replaces the one before it, so that its time left is its own; one that is over leaves nothing."""
        if phase != self._phase:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._phase, self._first, self._start = phase, done, time.monotonic()
            self._task = self._bar.add_task(phase, total=total, completed=done, state=state, eta="")
        left = eta(self._start, done - self._first, total - done) if done > self._first else "-:--:--"
        self._bar.update(self._task, completed=done, total=total, state=state, eta=left, visible=done < total)


@contextmanager
def _bar(*columns: Any) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield bar


@contextmanager
def show_progress() -> Iterator[PlainProgress | BarProgress]:
    """A listener that shows the run on stderr for as long as the context is open."""
    if not sys.stderr.isatty():
        yield PlainProgress()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn
    from rich.table import Column
    from rich.text import Text

    class State(ProgressColumn):
        """The one column that is cut where the terminal is narrow: only its cells are free to be narrower."""

        def render(self, task: Any) -> Text:
            return Text(task.fields["state"], no_wrap=True, overflow="ellipsis")

    whole = Column(no_wrap=True)
    what, left = (
        TextColumn(t, markup=False, table_column=whole) for t in ("{task.description}", "eta {task.fields[eta]}")
    )
    done = MofNCompleteColumn(table_column=whole)
    with _bar(what, BarColumn(16, table_column=whole), done, left, State(table_column=Column())) as bar:
        yield BarProgress(bar)


@contextmanager
def show_count(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A function of (done, total) that shows on stderr how far the work is, while the context is open."""
    start, shown = time.monotonic(), 0

    def plain(done: int, total: int) -> None:
        nonlocal start, shown
        if done < shown:  # the next of several passes
            start, shown = time.monotonic(), 0
        if done == total or done - shown >= total / LINES:
            shown = done
            note(f"{what} {done}/{total} {unit}  eta {eta(start, done, total - done)}")

    if not sys.stderr.isatty():
        yield plain
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    count = (MofNCompleteColumn(), TextColumn(unit))
    with _bar(TextColumn(what), BarColumn(bar_width=24), *count, TimeRemainingColumn()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
