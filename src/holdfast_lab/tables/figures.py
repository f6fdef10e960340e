"""Figures from results: harm against utility, harm against the poison ratio, quantile curves; a panel per task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from holdfast_lab.tables import lines
from holdfast_lab.tables.canvas import DASHES, MUTED, Looks, Picture, Window, draw, looks
from holdfast_lab.tables.lines import ACCURACY, QUANTILES, Line, lines_of
from holdfast_lab.tables.results import Result, require_one_protocol
from holdfast_lab.tables.table import Cell, pooled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Panel = Callable[[Any, "Points", Looks], None]
Close = Callable[["Points", Looks], "Window | None"]
Span = tuple[float, float]
CROWD = 3  # rows that cannot be distinguished from ours by eye before they are shown larger
_DASHED: dict[str, Any] = {"color": MUTED, "linestyle": DASHES, "linewidth": 1.2, "zorder": 1}
_OURS = {"markersize": 6.0, "linewidth": 2.2, "zorder": 3.5}
_OTHERS = {"markersize": 4.0, "linewidth": 1.1}
_BAR: dict[str, Any] = {
    "markersize": 6.5, "markeredgecolor": "white", "markeredgewidth": 0.6, "elinewidth": 1.0, "capsize": 2.0,
    "zorder": 3,
}  # fmt: skip


class Points:
    """The figures of one model and task, by row."""

    def __init__(self, results: Iterable[Result], model: str, task: str) -> None:
        self.task = task
        self._results = [result for result in results if (result.model, result.task) == (model, task)]
        self.ratios = sorted({result.poison_ratio for result in self._results if result.poison_ratio is not None})
        self.utility = lines.utility_of(self._results)
        # The reference that is drawn: the aligned model, as the attack found it.
        self.aligned = next((line for line in lines_of(self._results) if line.defense == "aligned"), None)

    def cell(self, line: Line, metric: str, ratio: float | None = None) -> Cell:
        found = [r for r in self._results if line.holds(r) and (ratio is None or r.poison_ratio == ratio)]
        return pooled(found, metric, self.task, ratio)

    def of_aligned(self, metric: str) -> float | None:
        return None if self.aligned is None else self.cell(self.aligned, metric).mean

    def span(self, line: Line, metric: str, ratio: float | None = None) -> Span | None:
        """From the lower to the upper end of a figure's bar."""
        cell = self.cell(line, metric, ratio)
        below, above = _reach(cell)
        return None if cell.mean is None else (cell.mean - below, cell.mean + above)


def figures(results: Sequence[Result]) -> list[Picture]:
    """Every figure for which there are results, a file per model."""
    everyone = lines.plain(lines.measured(results))
    require_one_protocol(everyone, "figures")
    ratio = lines.attack_ratio(everyone)
    at = f" at p = {ratio:g}" if ratio is not None else ""
    attacked = lines.at_ratio(lines.without_elsewhere(everyone)[0], ratio)
    pictures = []
    for model in lines.ordered_models(result.model for result in everyone):
        own = [result for result in everyone if result.model == model]
        styles = looks([line for line in lines_of(own) if not line.is_reference])
        now = [result for result in attacked if result.model == model]
        # Nobody is left out where defenses are compared by eye: the nearest rival may have a table of its own.
        title = f"Harm against utility, {model}{at}"
        pictures += _figure("harm_utility", title, lines.at_ratio(own, ratio), styles, _harm_utility, _near_ours)
        title = f"Harm against the poison ratio, {model}"
        pictures += _figure("harm_poison", title, _swept(own), styles, _harm_poison, _near_aligned)
        if any(f"HS_q{QUANTILES[0]}" in result.metrics for result in now):
            title = f"Quantiles of harm, {model}{at}"
            pictures += _figure("harm_quantiles", title, now, styles, _quantiles)
    names = lines.with_own_names([picture.name for picture in pictures])
    return [replace(picture, name=name) for picture, name in zip(pictures, names, strict=True)]


def _swept(results: Sequence[Result]) -> list[Result]:
    """The rows of a task that were run at two ratios or more, and the references of such tasks."""
    ratios: dict[tuple[str, Line], set[float]] = {}
    for result in results:
        if result.poison_ratio is not None:
            ratios.setdefault((result.task, Line.of(result)), set()).add(result.poison_ratio)
    rows = {row for row, found in ratios.items() if len(found) > 1}
    tasks = {task for task, _ in rows}
    return [r for r in results if (r.task, Line.of(r)) in rows or (r.is_reference and r.task in tasks)]


def _figure(
    name: str, title: str, results: Sequence[Result], styles: Looks, panel: Panel, close: Close | None = None
) -> list[Picture]:
    there = set(lines_of(results))
    shown = {line: look for line, look in styles.items() if line in there}
    tasks = lines.ordered_tasks(result.task for result in results if not result.is_reference)
    if not shown or not tasks:
        return []
    model = results[0].model
    panels = [(lines.task_title(task), Points(results, model, task)) for task in tasks]
    return [draw(lines.slug(name, model), title, panels, shown, panel, close)]


def _harm_utility(ax: Axes, points: Points, looks: Looks) -> None:
    from matplotlib.colors import to_rgba

    ax.set_xlabel(
        "FA (higher is better)" if points.utility == ACCURACY else "task loss (lower is better, further right)"
    )
    ax.set_ylabel("HS (lower is better)")
    ax.locator_params(axis="x", nbins=7, steps=[1, 2, 5, 10])
    if points.utility != ACCURACY:
        ax.invert_xaxis()
    for line, (colour, marker) in looks.items():
        x, y = points.cell(line, points.utility), points.cell(line, "HS")
        if x.mean is not None and y.mean is not None:
            bars = [None if c.low is None and c.std is None else [[end] for end in _reach(c)] for c in (x, y)]
            # Bars that cross many points are pale, so that points are seen; ours is larger and under the others.
            look = {**_bar(marker), "color": colour, "ecolor": to_rgba(colour, 0.4)}
            look |= {"zorder": 2.5, "markersize": 10.0} if _is_ours(line) else {}
            ax.errorbar(x.mean, y.mean, xerr=bars[0], yerr=bars[1], **look)
    for metric, rule in ((points.utility, ax.axvline), ("HS", ax.axhline)):
        if (value := points.of_aligned(metric)) is not None:
            rule(value, **_DASHED)


def _near_ours(points: Points, looks: Looks) -> Window | None:
    """The neighbourhood of holdfast: the rows whose intervals of harm and of utility both meet its own."""
    spans = {line: (points.span(line, points.utility), points.span(line, "HS")) for line in looks}
    own = next((spans[line] for line in looks if _is_ours(line)), (None, None))
    near = [(x, y) for x, y in spans.values() if _meet(x, own[0]) and _meet(y, own[1])]
    if len(near) <= CROWD:
        return None
    across, harm = (_framed([span for span in spans if span]) for spans in zip(*near, strict=True))
    return (across if points.utility == ACCURACY else (across[1], across[0])), harm


def _near_aligned(points: Points, looks: Looks) -> Window | None:
    """All ratios, and the harm of the rows that stay nearer to the aligned model than to the most harmful row."""
    spans = [[points.span(line, "HS", ratio) for ratio in points.ratios] for line in looks]
    rows = [row for found in spans if (row := [span for span in found if span is not None])]
    aligned = points.of_aligned("HS")
    if aligned is None or not rows:
        return None
    worst = [max(high for _, high in row) for row in rows]
    low = [row for row, high in zip(rows, worst, strict=True) if high < (aligned + max(worst)) / 2]
    if len(low) <= CROWD or len(low) == len(rows):
        return None
    return _framed([(p, p) for p in points.ratios]), _framed([(aligned, aligned), *chain(*low)])


def _harm_poison(ax: Axes, points: Points, looks: Looks) -> None:
    from matplotlib.transforms import ScaledTranslation

    ax.set_xlabel("poison ratio p")
    ax.set_ylabel("HS (lower is better)")
    for place, (line, (colour, marker)) in enumerate(looks.items()):
        cells = [(ratio, points.cell(line, "HS", ratio)) for ratio in points.ratios]
        there = [(ratio, cell.mean, *_reach(cell)) for ratio, cell in cells if cell.mean is not None]
        if there:
            x, y, below, above = zip(*there, strict=True)
            bars = ax.errorbar(x, y, yerr=[below, above], color=colour, linewidth=1.2, **_bar(marker))
            # A little to the side, since bars at one ratio would cover each other; its data stay.
            shift = 2.5 * (place - (len(looks) - 1) / 2)
            beside = ax.transData + ScaledTranslation(shift / 72, 0, ax.figure.dpi_scale_trans)
            for artist in bars.get_children():
                artist.set_transform(beside)
    ax.set_xticks(points.ratios, [f"{ratio:g}" for ratio in points.ratios])
    if (value := points.of_aligned("HS")) is not None:
        ax.axhline(value, **_DASHED)


def _quantiles(ax: Axes, points: Points, looks: Looks) -> None:
    import numpy as np

    ax.set_xlabel("K (percentile of prompts, evenly spaced)")
    ax.set_ylabel("HS_qK (lower is better)")
    ax.set_ylim(0, 1.03)
    # Percentiles at equal distances: the tail, where rows differ, is otherwise a hundredth of the axis.
    places = range(len(QUANTILES))
    even, uneven = (lambda k: np.interp(k, QUANTILES, places)), (lambda place: np.interp(place, places, QUANTILES))
    ax.set_xscale("function", functions=(even, uneven))
    curves: dict[Line, dict[str, Any]] = {
        line: {"color": colour, "marker": marker, **(_OURS if _is_ours(line) else _OTHERS)}
        for line, (colour, marker) in looks.items()
    }
    if points.aligned is not None:
        curves[points.aligned] = {"color": MUTED, "linestyle": DASHES, "linewidth": 1.4, "zorder": 4}
    for line, style in curves.items():
        values = [(k, points.cell(line, f"HS_q{k}").mean) for k in QUANTILES]
        if there := [(k, value) for k, value in values if value is not None]:
            ax.plot(*zip(*there, strict=True), clip_on=False, **style)
    ax.set_xticks(QUANTILES, [str(k) for k in QUANTILES])
    ax.minorticks_off()


def _bar(marker: str) -> dict[str, Any]:
    """How a point with bars looks; a star of the same size would look smaller than the others."""
    return {**_BAR, "marker": marker, "markersize": 9.5 if marker == "*" else _BAR["markersize"]}


def _is_ours(line: Line) -> bool:
    return line.defense == line.label == "holdfast"


def _meet(a: Span | None, b: Span | None) -> bool:
    return a is not None and b is not None and a[0] <= b[1] and b[0] <= a[1]


def _framed(spans: Sequence[Span]) -> Span:
    low, high = min(low for low, _ in spans), max(high for _, high in spans)
    edge = 0.05 * (high - low) or 0.01
    return low - edge, high + edge


def _reach(cell: Cell) -> Span:
    """How far a figure's bar goes down and up: its interval over prompts, so that rows of one seed and of several have
    bars of one meaning; the standard deviation over seeds where there is none."""
    if cell.mean is None or cell.low is None or cell.high is None:
        return cell.std or 0.0, cell.std or 0.0
    return cell.mean - cell.low, cell.high - cell.mean
