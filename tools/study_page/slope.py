"""The slope of harm over the poison ratio, with an interval.

Least squares: slope = sum_i w_i HS(p_i), w_i = (p_i - mean p) / sum_j (p_j - mean p)^2.

Its evidence follows `tools.study_page.pareto`:

three or more seeds    the t interval of the seeds' slopes
one seed               every prompt was answered at every p, so each has a slope of its own, sum_i w_i 1{harmful at
                       p_i}; the slope is their mean, and the interval the t interval of that mean. Without outcomes
                       per prompt: the figures' distances to their ends, each times |w_i|, added in squares, as if
                       every p had seen other prompts
two seeds              the mean of their slopes, and the means of the ends of their intervals; believed where both
                       seeds agree in sign. Figures without intervals: the t interval of two slopes after all
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from scipy.special import stdtrit
from tools.study_page.pareto import SEEDS
from tools.study_page.stored import outcomes

from holdfast.certification.comparison import compare_seeds
from holdfast_lab.tables.results import Result

Ratios = Mapping[float, Result]  # of one row and seed
LEVEL = 0.975  # of the upper end of a 95 % interval


@dataclass(frozen=True)
class Slope:
    """Change of a metric per unit of p, its 95 % interval, each seed's own slope, and the ratios it is from."""

    value: float
    low: float
    high: float
    ratios: tuple[float, ...]
    each: tuple[float, ...]

    @property
    def rises(self) -> bool:
        """Beyond the interval, and with every seed."""
        return self.low > 0 and min(self.each) > 0

    @property
    def falls(self) -> bool:
        """Beyond the interval, and with every seed."""
        return self.high < 0 and max(self.each) < 0


def slope(results: Sequence[Result], metric: str = "HS") -> Slope | None:
    """The slope of one row, from its seeds with the most ratios; None below two ratios or without intervals."""
    seeds: dict[int | None, dict[float, Result]] = {}
    for result in results:
        if metric in result.metrics and result.poison_ratio is not None:
            seeds.setdefault(result.seed, {})[result.poison_ratio] = result
    complete = _most_ratios([seeds[seed] for seed in sorted(seeds, key=lambda seed: -1 if seed is None else seed)])
    if not complete:
        return None
    ratios = tuple(sorted(complete[0]))
    few = None if len(complete) >= SEEDS else _of_prompts(complete, ratios, metric)
    if few is not None or len(complete) == 1:
        return few
    weights = _weights(ratios)
    each = [sum(w * one[p].metrics[metric].value for w, p in zip(weights, ratios, strict=True)) for one in complete]
    found = compare_seeds(each)
    return Slope(found.mean, found.lower, found.upper, ratios, found.differences)


def _most_ratios(seeds: Sequence[Ratios]) -> list[Ratios]:
    """The seeds that have as many ratios as any, two at least: a seed of which half was run would bend the slope.

    Of equally many ratios but others, those of the first such seed.
    """
    most = max((len(one) for one in seeds), default=0)
    full = [one for one in seeds if len(one) == most and most > 1]
    return [one for one in full if one.keys() == full[0].keys()]


def _weights(ratios: Sequence[float]) -> list[float]:
    mean = sum(ratios) / len(ratios)
    spread = sum((p - mean) ** 2 for p in ratios)
    return [(p - mean) / spread for p in ratios]


def _of_prompts(seeds: Sequence[Ratios], ratios: tuple[float, ...], metric: str) -> Slope | None:
    """Of one or two seeds; None where one has no interval."""
    rows = [[one[p] for p in ratios] for one in seeds]
    found = [_paired(row, _weights(ratios), metric) or _of_ends(row, _weights(ratios), metric) for row in rows]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None
    values, lows, highs = zip(*known, strict=True)
    return Slope(fmean(values), fmean(lows), fmean(highs), ratios, values)


def _paired(row: Sequence[Result], weights: Sequence[float], metric: str) -> tuple[float, float, float] | None:
    """(value, low, high) from the prompts' own slopes; None where outcomes are missing, or of another number."""
    found = [outcomes(result, metric) for result in row]
    if {len(one) for one in found} != {len(found[0])} or len(found[0]) < 2:
        return None
    each = np.asarray(weights) @ np.array(found, dtype=float)
    half = float(stdtrit(len(each) - 1, LEVEL)) * float(each.std(ddof=1)) / math.sqrt(len(each))
    return float(each.mean()), float(each.mean()) - half, float(each.mean()) + half


def _of_ends(row: Sequence[Result], weights: Sequence[float], metric: str) -> tuple[float, float, float] | None:
    value, below, above = 0.0, 0.0, 0.0
    for result, weight in zip(row, weights, strict=True):
        figure = result.metrics[metric]
        if figure.low is None or figure.high is None:
            return None
        down, up = weight * (figure.value - figure.low), weight * (figure.high - figure.value)
        value += weight * figure.value
        below += (down if weight > 0 else up) ** 2
        above += (up if weight > 0 else down) ** 2
    return value, value - math.sqrt(below), value + math.sqrt(above)
