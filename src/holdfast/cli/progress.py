"""Live progress of a run or a measurement: a bar with ETA on a terminal, about ten plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from holdfast.certification.kept import FIGURES
from holdfast.cli.terminal import clean, duration, note
from holdfast.core.percent import percent

LINES = 10  # plain lines per run, about
FORWARD = "forward passes"  # what a measurement counts: each example once a model


def describe_row(row: Mapping[str, Any]) -> str:
    """One step in words: loss, and per constraint g, multiplier and violation rate, where known."""
    parts = [f"loss {row['loss']:.3f}"] if row.get("loss") is not None else []
    shapes = {"g": "g {:+.3f}", "multiplier": "multiplier {:.3g}", "violation_rate": "violations {}"}
    for name, values in (row.get("constraints") or {"": row}).items():
        known = {key: values[key] for key in shapes if values.get(key) is not None}
        if "violation_rate" in known:
            known["violation_rate"] = percent(known["violation_rate"])
        if shown := [shapes[key].format(value) for key, value in known.items()]:
            parts.append(clean(f"{name}: " if name else "") + " ".join(shown))
    return "  ".join(parts)


def describe_behaviour(row: Mapping[str, Any]) -> str:
    """The behaviour monitor's figures in words."""
    return "  ".join(
        f"{FIGURES[name][0]} {percent(figure['share'])}{'' if figure['passed'] else ' (OVER the limit)'}"
        for name, figure in row["behaviour"].items()
        if figure["share"] is not None
    )


class PlainProgress:
    """Prints about ten lines over the run."""

    def __init__(self) -> None:
        self._total, self._first, self._start = 0, 0, time.monotonic()
        self._what, self._said = "", 0

    def __call__(self, row: Mapping[str, Any]) -> None:
        if row.get("stage") == "ask":
            self._asking(row)
            return
        if "stage" in row:
            self._total, self._first, self._start = row["total_steps"], row["step"], time.monotonic()
            resumed = f", continuing after step {self._first}" if self._first else ""
            note(f"training: {self._total} steps{resumed}")
            return
        step = row["step"]
        if "asked" in row:
            if row["asked"] == 0:
                note(f"step {step}/{self._total}  asking {row['of']} monitor prompts")
        elif "behaviour" in row:
            note(f"step {step}/{self._total}  {describe_behaviour(row)}")
        elif step == self._total or step % max(1, self._total // LINES) == 0:
            note(f"step {step}/{self._total}  {describe_row(row)}  eta {self._eta(step)}")

    def _asking(self, row: Mapping[str, Any]) -> None:
        what, done, total = row["what"], row["done"], row["total"]
        if what != self._what:
            self._what, self._first, self._start, self._said = what, done, time.monotonic(), -1
            if done < total:
                return  # how long it takes is known, and said, with the next batch
        if done * LINES // max(1, total) > self._said or done == total:
            self._said = done * LINES // max(1, total)
            self._total = total
            note(f"asking the model: {clean(what)}, {done} of {total}  eta {self._eta(done)}")

    def _eta(self, step: int) -> str:
        done = max(1, step - self._first)
        return duration((time.monotonic() - self._start) / done * (self._total - step))


class BarProgress:
    """Feeds a rich progress bar."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._task: Any = None
        self._asked: Any = None

    def __call__(self, row: Mapping[str, Any]) -> None:
        if row.get("stage") == "ask":
            if self._asked is None:
                self._asked = self._bar.add_task("ask", total=row["total"], state="")
            state = f"asking the model: {clean(row['what'])}"
            self._bar.update(self._asked, total=row["total"], completed=row["done"], state=state)
        elif "stage" in row:
            self._task = self._bar.add_task("train", total=row["total_steps"], completed=row["step"], state="")
        else:
            asked = f"monitor prompts: {row['asked']} of {row['of']} asked" if "asked" in row else ""
            state = asked or (describe_behaviour(row) if "behaviour" in row else describe_row(row))
            self._bar.update(self._task, completed=row["step"], state=state)


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
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    state = TextColumn("{task.fields[state]}", markup=False)
    with _bar(BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(), state) as bar:
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
            left = (time.monotonic() - start) / done * (total - done)
            note(f"{what} {done}/{total} {unit}  eta {duration(left)}")

    if not sys.stderr.isatty():
        yield plain
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    count = (MofNCompleteColumn(), TextColumn(unit))
    with _bar(TextColumn(what), BarColumn(bar_width=24), *count, TimeRemainingColumn()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
