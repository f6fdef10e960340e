"""The slope of harm over the poison ratio, with an interval.

Least squares: slope = sum_i w_i HS(p_i), w_i = (p_i - mean p) / sum_j (p_j - mean p)^2.
Two or more seeds: the t interval of the seeds' slopes. One seed: the figures' distances to their ends, each times
|w_i|, added in squares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.certification.comparison import compare_seeds
from holdfast.tables.results import Measured, Result


@dataclass(frozen=True)
class Slope:
    """Change of a metric per unit of p, its 95 % interval, and what it is from."""

    value: float
    low: float
    high: float
    ratios: tuple[float, ...]
    seeds: int


def slope(results: Sequence[Result], metric: str = "HS") -> Slope | None:
    """The slope of one row, over the ratios that all its seeds have; None below two ratios or without intervals."""
    seeds: dict[int | None, dict[float, Measured]] = {}
    for result in results:
        if metric in result.metrics and result.poison_ratio is not None:
            seeds.setdefault(result.seed, {})[result.poison_ratio] = result.metrics[metric]
    complete = _most_ratios(list(seeds.values()))
    if not complete:
        return None
    ratios = tuple(sorted(complete[0]))
    weights = _weights(ratios)
    if len(complete) > 1:
        each = [sum(w * one[p].value for w, p in zip(weights, ratios, strict=True)) for one in complete]
        found = compare_seeds(each)
        return Slope(found.mean, found.lower, found.upper, ratios, len(each))
    return _of_one_seed([complete[0][p] for p in ratios], weights, ratios)


def _most_ratios(seeds: Sequence[Mapping[float, Measured]]) -> list[Mapping[float, Measured]]:
    """The seeds that have as many ratios as any, two at least: a seed of which half was run would bend the slope."""
    most = max((len(one) for one in seeds), default=0)
    full = [one for one in seeds if len(one) == most and most > 1]
    return [one for one in full if one.keys() == full[0].keys()]


def _weights(ratios: Sequence[float]) -> list[float]:
    mean = sum(ratios) / len(ratios)
    spread = sum((p - mean) ** 2 for p in ratios)
    return [(p - mean) / spread for p in ratios]


def _of_one_seed(figures: Sequence[Measured], weights: Sequence[float], ratios: tuple[float, ...]) -> Slope | None:
    value, below, above = 0.0, 0.0, 0.0
    for figure, weight in zip(figures, weights, strict=True):
        if figure.low is None or figure.high is None:
            return None
        down, up = weight * (figure.value - figure.low), weight * (figure.high - figure.value)
        value += weight * figure.value
        below += (down if weight > 0 else up) ** 2
        above += (up if weight > 0 else down) ** 2
    return Slope(value, value - math.sqrt(below), value + math.sqrt(above), ratios, 1)
