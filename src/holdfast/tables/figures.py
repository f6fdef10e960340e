"""Figures from results: harm against utility, harm against the poison ratio, quantile curves; a panel per task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from holdfast.tables.canvas import DASHES, Looks, Picture, Window, draw
from holdfast.tables.choosing import at_ratio, attack_ratio, measured, without_elsewhere
from holdfast.tables.lines import Line, lines_of, plain
from holdfast.tables.palette import MUTED, looks
from holdfast.tables.protocols import require_one_protocol
from holdfast.tables.results import Result
from holdfast.tables.table import Cell, pooled
from holdfast.tables.utility import ACCURACY, utility_of
from holdfast.tables.wording import QUANTILES, ordered_models, ordered_tasks, slug, task_title

Panel = Callable[[Any, "Points", Looks], None]
Close = Callable[["Points", Looks], "Window | None"]
CROWD = 3  # rows that cannot be told from ours by eye before they are shown larger


class Points:
    """The figures of one model and task, by row."""

    def __init__(self, results: Iterable[Result], model: str, task: str) -> None:
        self.task = task
        self._results = [result for result in results if (result.model, result.task) == (model, task)]
        self.ratios = sorted({result.poison_ratio for result in self._results if result.poison_ratio is not None})

    def cell(self, line: Line, metric: str, ratio: float | None = None) -> Cell:
        """Mean and spread over seeds."""
        found = [r for r in self._results if line.holds(r) and (ratio is None or r.poison_ratio == ratio)]
        return pooled(found, metric, self.task, ratio)

    @property
    def utility(self) -> str:
        """What utility is measured by: accuracy, or the loss where accuracy is at floor."""
        return utility_of(self._results)

    @property
    def aligned(self) -> Line | None:
        """The reference that is drawn: the aligned model, as the attack found it."""
        return next((line for line in lines_of(self._results) if line.defense == "aligned"), None)


def figures(results: Sequence[Result]) -> list[Picture]:
    """Every figure for which there are results, a file per model.

    Raises:
        DataError: the results follow two protocols.
    """
    everyone = plain(measured(results))
    require_one_protocol(everyone, "figures")
    found, _ = without_elsewhere(everyone)
    ratio = attack_ratio(everyone)
    at = f" at p = {ratio:g}" if ratio is not None else ""
    attacked = at_ratio(found, ratio)
    pictures = []
    for model in ordered_models(result.model for result in everyone):
        own = [result for result in everyone if result.model == model]
        styles = looks([line for line in lines_of(own) if not line.is_reference])
        now = [result for result in attacked if result.model == model]
        # Nobody is left out where defenses are compared by eye: the nearest rival may have a table of its own.
        title = f"Harm against utility, {model}{at}"
        pictures += _figure("harm_utility", title, model, at_ratio(own, ratio), styles, _harm_utility, _near_ours)
        title = f"Harm against the poison ratio, {model}"
        pictures += _figure("harm_poison", title, model, _swept(own), styles, _harm_poison, _near_aligned)
        if any(f"HS_q{QUANTILES[0]}" in result.metrics for result in now):
            title = f"Quantiles of harm, {model}{at}"
            pictures += _figure("harm_quantiles", title, model, now, styles, _quantiles)
    return _with_own_names(pictures)


def _with_own_names(pictures: Sequence[Picture]) -> list[Picture]:
    """Two models whose names differ only in signs would share a file; the later one is numbered."""
    taken: dict[str, int] = {}
    found = []
    for picture in pictures:
        name = picture.name
        while name in taken:
            taken[picture.name] += 1
            name = f"{picture.name}-{taken[picture.name]}"
        taken[name] = 1
        found.append(replace(picture, name=name))
    return found


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
    name: str,
    title: str,
    model: str,
    results: Sequence[Result],
    styles: Looks,
    panel: Panel,
    close: Close | None = None,
) -> list[Picture]:
    there = set(lines_of(results))
    shown = {line: look for line, look in styles.items() if line in there}
    tasks = ordered_tasks(result.task for result in results if not result.is_reference)
    if not shown or not tasks:
        return []
    panels = [(task_title(task), Points(results, model, task)) for task in tasks]
    return [draw(slug(name, model), title, panels, shown, panel, close)]


def _harm_utility(ax: Any, points: Points, looks: Looks) -> None:
    """A point per defense with its intervals over prompts; the aligned model dashed."""
    utility = points.utility
    ax.set_xlabel("FA (higher is better)" if utility == ACCURACY else "task loss (lower is better, further right)")
    ax.set_ylabel("HS (lower is better)")
    ax.locator_params(axis="x", nbins=7, steps=[1, 2, 5, 10])
    if utility != ACCURACY:
        ax.invert_xaxis()
    for line, (colour, marker) in looks.items():
        x, y = points.cell(line, utility), points.cell(line, "HS")
        if x.mean is not None and y.mean is not None:
            look = {"color": colour, **_bar(marker), **_faint(line, colour)}
            ax.errorbar(x.mean, y.mean, xerr=_reach(x), yerr=_reach(y), **look)
    if points.aligned is not None:
        for metric, rule in ((utility, ax.axvline), ("HS", ax.axhline)):
            value = points.cell(points.aligned, metric).mean
            if value is not None:
                rule(value, **_DASHED)


def _near_ours(points: Points, looks: Looks) -> Window | None:
    """The neighbourhood of holdfast: the rows whose intervals of harm and of utility both meet its own."""
    ours = next((line for line in looks if _is_ours(line)), None)
    spans = {line: [_span(points.cell(line, metric)) for metric in (points.utility, "HS")] for line in looks}
    own = spans.get(ours) if ours is not None else None
    if own is None or None in own:
        return None
    near = [both for both in spans.values() if all(a and b and _meet(a, b) for a, b in zip(both, own, strict=True))]
    if len(near) <= CROWD:
        return None
    x, y = ([span for span in axis if span is not None] for axis in zip(*near, strict=True))
    across = _framed(x)
    return (across if points.utility == ACCURACY else (across[1], across[0])), _framed(y)


def _near_aligned(points: Points, looks: Looks) -> Window | None:
    """All ratios, and the harm of the rows that stay nearer to the aligned model than to the most harmful row."""
    spans = [[_span(points.cell(line, "HS", ratio)) for ratio in points.ratios] for line in looks]
    rows = [[span for span in row if span is not None] for row in spans]
    aligned = points.cell(points.aligned, "HS").mean if points.aligned is not None else None
    highest = max((high for row in rows for _, high in row), default=None)
    if aligned is None or highest is None:
        return None
    low = [row for row in rows if row and max(high for _, high in row) < (aligned + highest) / 2]
    if len(low) <= CROWD or len(low) == sum(bool(row) for row in rows):
        return None
    return _framed([(p, p) for p in points.ratios]), _framed(
        [(aligned, aligned), *(span for row in low for span in row)]
    )


def _harm_poison(ax: Any, points: Points, looks: Looks) -> None:
    """A line per defense over the poison ratios; the aligned model's harm as a dashed line."""
    ax.set_xlabel("poison ratio p")
    ax.set_ylabel("HS (lower is better)")
    for place, (line, (colour, marker)) in enumerate(looks.items()):
        cells = [(ratio, points.cell(line, "HS", ratio)) for ratio in points.ratios]
        there = [(ratio, cell.mean, *_below_above(cell)) for ratio, cell in cells if cell.mean is not None]
        if there:
            x, y, below, above = zip(*there, strict=True)
            bars = ax.errorbar(x, y, yerr=[below, above], color=colour, linewidth=1.2, **_bar(marker))
            _move_aside(ax, bars, 2.5 * (place - (len(looks) - 1) / 2))
    ax.set_xticks(points.ratios, [f"{ratio:g}" for ratio in points.ratios])
    _dashed_harm(ax, points)


def _quantiles(ax: Any, points: Points, looks: Looks) -> None:
    """The K-th percentile of per-prompt harm over K, a line per defense; the aligned model's dashed."""
    ax.set_xlabel("K (percentile of prompts, evenly spaced)")
    ax.set_ylabel("HS_qK (lower is better)")
    ax.set_ylim(0, 1.03)
    ax.set_xscale("function", functions=(_even, _uneven))
    curves = [
        (line, {"color": colour, "marker": marker, **(_OURS if _is_ours(line) else _OTHERS)})
        for line, (colour, marker) in looks.items()
    ]
    if points.aligned is not None:
        curves.append((points.aligned, {"color": MUTED, "linestyle": DASHES, "linewidth": 1.4, "zorder": 4}))
    for line, style in curves:
        found = [(k, points.cell(line, f"HS_q{k}").mean) for k in QUANTILES]
        there = [(k, value) for k, value in found if value is not None]
        if there:
            ax.plot(*zip(*there, strict=True), clip_on=False, **style)
    ax.set_xticks(QUANTILES, [str(k) for k in QUANTILES])
    ax.minorticks_off()


def _bar(marker: str) -> dict[str, Any]:
    """How a point with bars looks; a star of the same size would look smaller than the others."""
    return {**_BAR, "marker": marker, "markersize": 9.5 if marker == "*" else _BAR["markersize"]}


def _faint(line: Line, colour: str) -> dict[str, Any]:
    """Bars that cross many points are pale, so that points are seen; ours is larger and under the others."""
    from matplotlib.colors import to_rgba

    ours = {"zorder": 2.5, "markersize": 10.0} if _is_ours(line) else {}
    return {"ecolor": to_rgba(colour, 0.4), **ours}


def _is_ours(line: Line) -> bool:
    return line.defense == "holdfast" and line.label == line.defense


def _move_aside(ax: Any, bars: Any, shift: float) -> None:
    """Draw a row `shift` points to the side: bars at one ratio would cover each other. Its data stay."""
    from matplotlib.transforms import ScaledTranslation

    beside = ax.transData + ScaledTranslation(shift / 72, 0, ax.figure.dpi_scale_trans)
    for artist in bars.get_children():
        artist.set_transform(beside)


def _even(k: Any) -> Any:
    """Percentiles at equal distances: the tail, where rows differ, is otherwise a hundredth of the axis."""
    import numpy as np

    return np.interp(k, QUANTILES, range(len(QUANTILES)))


def _uneven(place: Any) -> Any:
    import numpy as np

    return np.interp(place, range(len(QUANTILES)), QUANTILES)


def _span(cell: Cell) -> tuple[float, float] | None:
    """From the lower to the upper end of a figure's bar."""
    if cell.mean is None:
        return None
    below, above = _below_above(cell)
    return cell.mean - below, cell.mean + above


def _meet(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def _framed(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    low, high = min(low for low, _ in spans), max(high for _, high in spans)
    edge = 0.05 * (high - low) or 0.01
    return low - edge, high + edge


def _below_above(cell: Cell) -> tuple[float, float]:
    reach = _reach(cell)
    return (reach[0][0], reach[1][0]) if isinstance(reach, list) else (reach or 0.0, reach or 0.0)


def _reach(cell: Cell) -> float | list[list[float]] | None:
    """How far the bar of a figure goes: its interval over prompts, so that rows of one seed and of several have bars of
    one meaning; the standard deviation over seeds where there is none."""
    if cell.mean is None or cell.low is None or cell.high is None:
        return cell.std
    return [[cell.mean - cell.low], [cell.high - cell.mean]]


def _dashed_harm(ax: Any, points: Points) -> None:
    value = points.cell(points.aligned, "HS").mean if points.aligned is not None else None
    if value is not None:
        ax.axhline(value, **_DASHED)


_DASHED = {"color": MUTED, "linestyle": DASHES, "linewidth": 1.2, "zorder": 1}
_OURS = {"markersize": 6.0, "linewidth": 2.2, "zorder": 3.5}
_OTHERS = {"markersize": 4.0, "linewidth": 1.1}
_BAR: dict[str, Any] = {
    "markersize": 6.5,
    "markeredgecolor": "white",
    "markeredgewidth": 0.6,
    "elinewidth": 1.0,
    "capsize": 2.0,
    "zorder": 3,
}
