"""Live progress of a run: a bar with ETA and the state of the constraint; plain lines without a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from holdfast.certification.kept import FIGURES
from holdfast.cli.terminal import clean, duration, note
from holdfast.core.percent import percent

LINES = 10
"""Plain lines per run, about."""


def describe_row(row: Mapping[str, Any]) -> str:
    """One step in words: loss, and per constraint g, multiplier and violation rate, where known."""
    parts = [f"loss {row['loss']:.3f}"] if row.get("loss") is not None else []
    named = row.get("constraints") or {"": row}
    for name, values in named.items():
        shown = []
        if values.get("g") is not None:
            shown.append(f"g {values['g']:+.3f}")
        if values.get("multiplier") is not None:
            shown.append(f"multiplier {values['multiplier']:.3g}")
        if values.get("violation_rate") is not None:
            shown.append(f"violations {percent(values['violation_rate'])}")
        if shown:
            parts.append(clean(f"{name}: " if name else "") + " ".join(shown))
    return "  ".join(parts)


def describe_behaviour(row: Mapping[str, Any]) -> str:
    """The behaviour monitor's figures in words."""
    shares = [
        f"{FIGURES[name][0]} {percent(figure['share'])}{'' if figure['passed'] else ' (OVER the limit)'}"
        for name, figure in row["behaviour"].items()
        if figure["share"] is not None
    ]
    return "  ".join(shares)


def _state(row: Mapping[str, Any]) -> str:
    """What stands beside the bar."""
    if "asked" in row:
        return f"monitor prompts: {row['asked']} of {row['of']} asked"
    return describe_behaviour(row) if "behaviour" in row else describe_row(row)


class PlainProgress:
    """Prints about ten lines over the run."""

    def __init__(self) -> None:
        self._total = 0
        self._first = 0
        self._start = time.monotonic()
        self._what, self._said = "", 0

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Take one row of the listeners' stream."""
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
            self._what, self._first, self._start, self._said = what, done, time.monotonic(), 0
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
        """Take one row of the listeners' stream."""
        if row.get("stage") == "ask":
            if self._asked is None:
                self._asked = self._bar.add_task("ask", total=row["total"], state="")
            state = f"asking the model: {clean(row['what'])}"
            self._bar.update(self._asked, total=row["total"], completed=row["done"], state=state)
        elif "stage" in row:
            self._task = self._bar.add_task("train", total=row["total_steps"], completed=row["step"], state="")
        else:
            self._bar.update(self._task, completed=row["step"], state=_state(row))


@contextmanager
def show_progress() -> Iterator[PlainProgress | BarProgress]:
    """A listener that shows the run on stderr for as long as the context is open."""
    if not sys.stderr.isatty():
        yield PlainProgress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[state]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield BarProgress(bar)
