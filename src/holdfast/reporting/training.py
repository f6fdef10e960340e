"""The course of training from events.jsonl: what the defense saw of its constraint, how hard it pushed, and when."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from holdfast.core.percent import exact_percent, percent
from holdfast.reporting.svg import Scale, Size, element, line, picture, polyline, text, tick_label, ticks, x_axis

MAX_COLUMNS = 240
EVENTS = {
    "inactive": "no correction was asked for: the task's own step was left alone, or pulled back towards theta_0",
    "active": "the constraint changed the step: a filter corrected it, or a term was added to the loss",
    "capped": "the same, at the strongest allowed: the filter's trust region, or the multiplier's cap",
    "restoration": "g > 0 and the correction did not fit: the task step was dropped",
    "infeasible": "g > 0 and its gradient is 0: no direction helps, nothing moved",
    "infeasible_start": "the run was allowed to start with g > 0",
    "nonfinite": "a loss or gradient was not finite: a filter discarded the step, a term in the loss was left out",
    "spike": "the task loss was far above all before: the step was discarded",
}
"""What defenses log as `event`, in words true of those with a filter and of those with a term in the loss."""
ROW = 17


@dataclass(frozen=True)
class Course:
    """One safety set over the steps; a value that is absent or not finite is NaN."""

    steps: NDArray[np.float64]
    violation_rate: NDArray[np.float64]
    g: NDArray[np.float64]
    multiplier: NDArray[np.float64]
    events: tuple[str, ...]

    @property
    def constrained(self) -> bool:
        """Whether the run logged a constraint at all; plain fine-tuning and most defenses have none."""
        return bool(np.isfinite(self.g).any())

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(self.events)
        return {name: found[name] for name in EVENTS if found[name]}


def course(rows: Sequence[Mapping[str, Any]], name: str) -> Course:
    """The rows of one safety set; with several sets a row holds them under `constraints`."""
    rows = [row for row in rows if "behaviour" not in row]  # the behaviour monitor's are no steps

    def inner(row: Mapping[str, Any]) -> Mapping[str, Any]:
        several = row.get("constraints")
        found = several.get(name) if isinstance(several, Mapping) else None
        return found if isinstance(found, Mapping) else row

    def column(key: str) -> NDArray[np.float64]:
        values = [inner(row).get(key) for row in rows]
        numbers = [v if isinstance(v, int | float) and not isinstance(v, bool) else math.nan for v in values]
        return np.array(numbers, dtype=np.float64)

    steps = np.array([float(row["step"]) for row in rows])
    events = tuple(str(row.get("event", "")) for row in rows)
    return Course(steps, column("violation_rate"), column("g"), column("multiplier"), events)


def training_chart(found: Course, alpha: float, width: int, css: str) -> Markup:
    """Three panels over one step axis, and one row of marks for each kind of event."""
    kinds = [name for name in found.counts if name != "inactive"]
    narrow = width < 500
    (panel, gap), left = ((92, 34), 68) if narrow else ((104, 36), 92)
    strip = 3 * (panel + gap) + 4
    bottom = strip + ROW * max(len(kinds), 1) + 10
    size = Size(width, bottom + 42, left=left, right=14)
    x = Scale(float(found.steps[0]), max(float(found.steps[-1]), float(found.steps[0]) + 1), left, width - 14)
    rates, g, m = found.violation_rate, found.g, found.multiplier
    parts = [
        *_panel(found.steps, rates, "curve rate", x, 22, panel, "violations in the batch", alpha, share=True),
        *_panel(found.steps, g, "curve value", x, 22 + panel + gap, panel, "value of the constraint, g", 0.0),
        *_panel(found.steps, m, "curve lambda", x, 22 + 2 * (panel + gap), panel, "multiplier λ", None),
        *_marks(found, kinds, x, strip, size),
    ]  # fmt: skip
    parts += x_axis(x, bottom, size, "training step", 4 if narrow else 8, whole=True)
    spoken = ", ".join(f"{name} {n}" for name, n in found.counts.items())
    last_g, last_m = (f"{v[-1]:.4g}" if v.size and math.isfinite(v[-1]) else "unknown" for v in (g, m))
    about = f"{len(found.steps)} steps. Events: {spoken or 'none'}. Last g {last_g}, last multiplier {last_m}."
    return picture(size, "Constraint, multiplier and violations over training", about, parts, css)


def _panel(
    steps: NDArray[np.float64], values: NDArray[np.float64], css: str, x: Scale, top: float, height: float,
    title: str, level: float | None, *, share: bool = False,
) -> list[Markup]:  # fmt: skip
    every = values[np.isfinite(values)]
    if not every.size:  # an empty frame with a limit in it would look like a run that keeps it
        return [text(f"{title}: not logged", x.start, top - 8, "panel")]
    low = min(0.0, float(every.min()))
    high = max(float(every.max()), 0.0 if level is None else level)
    high = high + 0.08 * (high - low) if high > low else low + 1.0
    y = Scale(low, high, top + height, top)
    parts = [text(title, x.start, top - 8, "panel")]
    for value in ticks(low, high, 3):
        label = percent(value) if share else tick_label(value)
        parts += [line(x.start, y(value), x.end, y(value), "grid"), text(label, x.start - 8, y(value) + 4, "", "end")]
    if level is not None:
        parts.append(line(x.start, y(level), x.end, y(level), "limit"))
        words = f"limit {exact_percent(level)}" if share else "g = 0"
        hangs = every[-1] > level  # on the side of the line where the curve does not end
        parts.append(text(words, x.end, y(level) + (15 if hangs else -5), "strong", "end"))
    for piece in _pieces(steps, values):
        a, b = piece[0]
        alone = len(piece) == 1  # a step between others that measured nothing (`every`)
        dot = element("circle", class_=css, cx=x(a), cy=y(b), r=1.0)
        parts.append(dot if alone else polyline([(x(a), y(b)) for a, b in piece], css))
    return parts


def _pieces(steps: NDArray[np.float64], values: NDArray[np.float64]) -> list[list[tuple[float, float]]]:
    """The curve as pieces, broken where nothing was measured; a long run by the lowest and highest value a column."""
    per = max(1, math.ceil(len(steps) / MAX_COLUMNS))
    pieces: list[list[tuple[float, float]]] = [[]]
    for start in range(0, len(steps), per):
        chunk = values[start : start + per]
        finite = np.flatnonzero(np.isfinite(chunk))
        if not finite.size:
            pieces.append([])
            continue
        ends = {int(finite[np.argmin(chunk[finite])]), int(finite[np.argmax(chunk[finite])])}
        pieces[-1] += [(float(steps[start + i]), float(chunk[i])) for i in sorted(ends)]
    return [piece for piece in pieces if piece]


def _marks(found: Course, kinds: Sequence[str], x: Scale, top: float, size: Size) -> list[Markup]:
    """A row of ticks for each kind of event: told apart by place, not by colour."""
    if not kinds:
        return [text("no step was corrected", size.left, top + 12, "muted")]
    parts = []
    for number, kind in enumerate(kinds):
        y = top + number * ROW
        label = {"restoration": "restored", "infeasible_start": "bad start"}.get(kind, kind)
        parts.append(text(label, size.left - 8, y + 11, "small", "end"))
        places = sorted({round(x(s), 0) for s, e in zip(found.steps.tolist(), found.events, strict=True) if e == kind})
        parts += [element("rect", class_=f"mark-{kind}", x=p - 1.0, y=y + 2.0, width=2.0, height=11.0) for p in places]
    return parts
