"""Who dominates whom in harm and utility, decided by intervals of differences; arithmetic on results, nothing else.

Prompts within one seed and seeds measure different things and are never pooled (`holdfast.certification.comparison`).
So the difference of two rows has the interval of its evidence:

seeds     three or more seeds that both rows have: mean +- t sd / sqrt(S) of the differences per seed
given     two common seeds, outcomes per example: the mean over both, and the means of the ends of their two paired
          intervals; no narrower than theirs, since both saw the same prompts. It speaks of these seeds on other
          prompts. An interval over two seeds would be 9 standard deviations to each side; this one is believed where
          both seeds agree
prompts   one common seed, outcomes per example in both results: Newcombe's interval for paired shares
ends      intervals alone: d - sqrt((a - a_low)^2 + (b_high - b)^2), and likewise above, as if the two rows were
          measured on different prompts; on the same prompts this is usually wider than it needs to be. Of two seeds the
          mean of both; where figures have no intervals, the one over seeds after all
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from tools.study_page.stored import outcomes

from holdfast.certification.comparison import compare_prompts, compare_seeds
from holdfast_lab.tables.lines import LOSS
from holdfast_lab.tables.results import Measured, Result

Evidence = Literal["seeds", "given", "prompts", "ends"]
HARM = "HS"
SEEDS = 3  # from which on the t interval over seeds is used


@dataclass(frozen=True)
class Difference:
    """A minus B with a 95 % interval, each seed's own difference, and McNemar's p value where one seed was paired."""

    value: float
    low: float
    high: float
    each: tuple[float, ...]
    evidence: Evidence
    p_value: float | None = None

    @property
    def seeds(self) -> int:
        """How many seeds it is from."""
        return len(self.each)

    @property
    def is_lower(self) -> bool:
        """Whether A lies below B beyond the interval, and with every seed."""
        return self.high < 0 and max(self.each) < 0

    @property
    def is_higher(self) -> bool:
        """Whether A lies above B beyond the interval, and with every seed."""
        return self.low > 0 and min(self.each) > 0


def difference(a: Sequence[Result], b: Sequence[Result], metric: str) -> Difference | None:
    """A minus B of `metric` over the seeds that both have; None where they share no seed, or have no interval."""
    of_a, of_b = ({r.seed: r for r in rows if metric in r.metrics} for rows in (a, b))
    seeds = sorted(of_a.keys() & of_b.keys(), key=lambda seed: -1 if seed is None else seed)
    if not seeds:
        return None
    ours, theirs = [of_a[seed] for seed in seeds], [of_b[seed] for seed in seeds]
    few = None if len(seeds) >= SEEDS else _of_outcomes(ours, theirs, metric) or _mean_of_ends(ours, theirs, metric)
    return few if few is not None or len(seeds) == 1 else _of_seeds(ours, theirs, metric)


def _of_seeds(a: Sequence[Result], b: Sequence[Result], metric: str) -> Difference:
    found = compare_seeds([x.metrics[metric].value - y.metrics[metric].value for x, y in zip(a, b, strict=True)])
    return Difference(found.mean, found.lower, found.upper, found.differences, "seeds")


def _of_outcomes(a: Sequence[Result], b: Sequence[Result], metric: str) -> Difference | None:
    """Of one or two seeds, prompt by prompt; None where a result has no outcomes, or another number of them."""
    ours, theirs = ([list(outcomes(result, metric)) for result in rows] for rows in (a, b))
    if {len(one) for one in ours + theirs} != {len(ours[0])} or not ours[0]:
        return None
    each = [compare_prompts(x, y) for x, y in zip(ours, theirs, strict=True)]
    values, lows, highs = zip(*((one.difference, one.lower, one.upper) for one in each), strict=True)
    kind: Evidence = "prompts" if len(each) == 1 else "given"
    p_value = each[0].p_value if len(each) == 1 else None
    return Difference(fmean(values), fmean(lows), fmean(highs), values, kind, p_value)


def _mean_of_ends(a: Sequence[Result], b: Sequence[Result], metric: str) -> Difference | None:
    """The mean of the seeds' differences; the interval is no narrower than theirs: they saw the same prompts."""
    found = [of_ends(x.metrics[metric], y.metrics[metric]) for x, y in zip(a, b, strict=True)]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None
    values, lows, highs = zip(*((one.value, one.low, one.high) for one in known), strict=True)
    return Difference(fmean(values), fmean(lows), fmean(highs), values, "ends")


def of_ends(a: Measured, b: Measured) -> Difference | None:
    """The difference of two figures with its interval from theirs; None where one has no interval."""
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return None
    value = a.value - b.value
    low = value - math.hypot(a.value - a.low, b.high - b.value)
    high = value + math.hypot(a.high - a.value, b.value - b.low)
    return Difference(value, low, high, (value,), "ends")


@dataclass(frozen=True)
class Comparison:
    """A against B: the differences of harm and of utility, A minus B; `metric` is the utility's."""

    harm: Difference
    utility: Difference
    metric: str

    @property
    def dominates(self) -> bool:
        """A is less harmful and more useful than B, both beyond their intervals."""
        return self.harm.is_lower and self._gain(self.utility.is_higher, self.utility.is_lower)

    @property
    def is_dominated(self) -> bool:
        """B is less harmful and more useful than A, both beyond their intervals."""
        return self.harm.is_higher and self._gain(self.utility.is_lower, self.utility.is_higher)

    @property
    def is_dominated_by_value(self) -> bool:
        """B is at least as good in both and better in one, by the figures alone, whatever their intervals."""
        loss = self.utility.value if self.metric == LOSS else -self.utility.value  # > 0: A is less useful
        return self.harm.value >= 0 and loss >= 0 and (self.harm.value > 0 or loss > 0)

    def _gain(self, accuracy: bool, loss: bool) -> bool:
        return loss if self.metric == LOSS else accuracy


def compare(a: Sequence[Result], b: Sequence[Result], utility: str) -> Comparison | None:
    """Two rows of one task and poison ratio; None where they cannot be compared."""
    harm, useful = difference(a, b, HARM), difference(a, b, utility)
    return None if harm is None or useful is None else Comparison(harm, useful, utility)


def dominators(rows: Mapping[str, Sequence[Result]], name: str, utility: str) -> tuple[list[str], list[str]]:
    """The rows that dominate `name`: beyond the intervals, and by the figures alone."""
    beyond, by_value = [], []
    for other, results in rows.items():
        found = None if other == name else compare(rows[name], results, utility)
        if found is not None and found.is_dominated:
            beyond.append(other)
        if found is not None and found.is_dominated_by_value:
            by_value.append(other)
    return beyond, by_value
