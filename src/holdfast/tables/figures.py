"""Figures from results: harm against utility, harm against the poison ratio, quantile curves; a panel per task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from holdfast.tables.canvas import DASHES, Picture, draw
from holdfast.tables.choosing import at_ratio, attack_ratio, measured, without_elsewhere
from holdfast.tables.lines import Line, lines_of, plain
from holdfast.tables.palette import MUTED
from holdfast.tables.protocols import require_one_protocol
from holdfast.tables.results import Result
from holdfast.tables.table import Cell, pooled
from holdfast.tables.utility import ACCURACY, utility_of
from holdfast.tables.wording import QUANTILES, ordered_models, ordered_tasks, slug, task_title

Look = tuple[str, str]
Panel = Callable[[Any, "Points", dict[Line, Look]], None]


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
        now = [result for result in attacked if result.model == model]
        # Nobody is left out where defenses are compared by eye: the nearest rival may have a table of its own.
        pictures += _figure(
            "harm_utility", f"Harm against utility, {model}{at}", model, at_ratio(own, ratio), _harm_utility
        )
        if len({result.poison_ratio for result in own if result.poison_ratio is not None}) > 1:
            pictures += _figure("harm_poison", f"Harm against the poison ratio, {model}", model, own, _harm_poison)
        if any(f"HS_q{QUANTILES[0]}" in result.metrics for result in now):
            pictures += _figure("harm_quantiles", f"Quantiles of harm, {model}{at}", model, now, _quantiles)
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


def _figure(name: str, title: str, model: str, results: Sequence[Result], panel: Panel) -> list[Picture]:
    lines = [line for line in lines_of(results) if not line.is_reference]
    tasks = ordered_tasks(result.task for result in results if not result.is_reference)
    if not lines or not tasks:
        return []
    panels = [(task_title(task), Points(results, model, task)) for task in tasks]
    return [draw(slug(name, model), title, panels, lines, panel)]


def _harm_utility(ax: Any, points: Points, looks: dict[Line, Look]) -> None:
    """A point per defense with its spread over seeds, or the interval of its one seed; the aligned model dashed."""
    utility = points.utility
    ax.set_xlabel("FA (higher is better)" if utility == ACCURACY else "task loss (lower is better, further right)")
    ax.set_ylabel("HS (lower is better)")
    if utility != ACCURACY:
        ax.invert_xaxis()
    for line, (colour, marker) in looks.items():
        x, y = points.cell(line, utility), points.cell(line, "HS")
        if x.mean is not None and y.mean is not None:
            look = {"color": colour, "marker": marker, **_BAR, **_faint(line, colour)}
            ax.errorbar(x.mean, y.mean, xerr=_reach(x), yerr=_reach(y), **look)
    if points.aligned is not None:
        for metric, rule in ((utility, ax.axvline), ("HS", ax.axhline)):
            value = points.cell(points.aligned, metric).mean
            if value is not None:
                rule(value, **_DASHED)


def _harm_poison(ax: Any, points: Points, looks: dict[Line, Look]) -> None:
    """A line per defense over the poison ratios; the aligned model's harm as a dashed line."""
    ax.set_xlabel("poison ratio p")
    ax.set_ylabel("HS (lower is better)")
    for line, (colour, marker) in looks.items():
        cells = [(ratio, points.cell(line, "HS", ratio)) for ratio in points.ratios]
        there = [(ratio, cell.mean, *_below_above(cell)) for ratio, cell in cells if cell.mean is not None]
        if there:
            x, y, below, above = zip(*there, strict=True)
            ax.errorbar(x, y, yerr=[below, above], color=colour, marker=marker, linewidth=1.4, **_BAR)
    ax.set_xticks(points.ratios, [f"{ratio:g}" for ratio in points.ratios])
    _dashed_harm(ax, points)


def _quantiles(ax: Any, points: Points, looks: dict[Line, Look]) -> None:
    """The K-th percentile of per-prompt harm over K, a line per defense; the aligned model's dashed."""
    ax.set_xlabel("K (percentile of prompts)")
    ax.set_ylabel("HS_qK (lower is better)")
    ax.set_ylim(0, 1.03)
    curves = [
        (line, {"color": colour, "marker": marker, "markersize": 4.5}) for line, (colour, marker) in looks.items()
    ]
    if points.aligned is not None:
        curves.append((points.aligned, {"color": MUTED, "linestyle": DASHES, "zorder": 4}))
    for line, style in curves:
        found = [(k, points.cell(line, f"HS_q{k}").mean) for k in QUANTILES]
        there = [(k, value) for k, value in found if value is not None]
        if there:
            ax.plot(*zip(*there, strict=True), linewidth=1.4, **style)
    ax.set_xticks([10, 25, 50, 75, 90, 100])


def _faint(line: Line, colour: str) -> dict[str, Any]:
    """Bars that cross many points are pale, so that points are seen; ours is larger and under the others."""
    from matplotlib.colors import to_rgba

    ours = {"zorder": 2.5, "markersize": 10.0} if line.defense == "holdfast" and line.label == line.defense else {}
    return {"ecolor": to_rgba(colour, 0.4), **ours}


def _below_above(cell: Cell) -> tuple[float, float]:
    reach = _reach(cell)
    return (reach[0][0], reach[1][0]) if isinstance(reach, list) else (reach or 0.0, reach or 0.0)


def _reach(cell: Cell) -> float | list[list[float]] | None:
    """How far the bar of a figure goes: the standard deviation over seeds, or the interval of one seed."""
    if cell.std is not None or cell.mean is None or cell.low is None or cell.high is None:
        return cell.std
    return [[cell.mean - cell.low], [cell.high - cell.mean]]


def _dashed_harm(ax: Any, points: Points) -> None:
    value = points.cell(points.aligned, "HS").mean if points.aligned is not None else None
    if value is not None:
        ax.axhline(value, **_DASHED)


_DASHED = {"color": MUTED, "linestyle": DASHES, "linewidth": 1.2, "zorder": 1}
_BAR: dict[str, Any] = {
    "markersize": 6.5,
    "markeredgecolor": "white",
    "markeredgewidth": 0.6,
    "elinewidth": 1.0,
    "capsize": 2.0,
    "zorder": 3,
}
