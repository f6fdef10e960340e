"""Who dominates whom in harm and utility, decided by intervals of differences; arithmetic on results, nothing else.

Prompts within one seed and seeds measure different things and are never pooled (`holdfast.certification.comparison`).
So the difference of two rows has the interval of its evidence:

seeds     two or more seeds that both rows have: mean +- t sd / sqrt(S) of the differences per seed
prompts   one common seed, outcomes per example in both results: Newcombe's interval for paired shares
ends      one common seed, intervals alone: d - sqrt((a - a_low)^2 + (b_high - b)^2), and likewise above, as if the two
          rows were measured on different prompts; on the same prompts this is usually wider than it needs to be
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.certification.comparison import compare_prompts, compare_seeds
from holdfast.tables.results import Measured, Result
from holdfast.tables.utility import LOSS

Evidence = Literal["seeds", "prompts", "ends"]
HARM = "HS"


@dataclass(frozen=True)
class Difference:
    """A minus B with a 95 % interval, the seeds it is from, and McNemar's p value where outcomes were paired."""

    value: float
    low: float
    high: float
    seeds: int
    evidence: Evidence
    p_value: float | None = None

    @property
    def is_lower(self) -> bool:
        """Whether A lies below B beyond the interval."""
        return self.high < 0

    @property
    def is_higher(self) -> bool:
        """Whether A lies above B beyond the interval."""
        return self.low > 0


def difference(a: Sequence[Result], b: Sequence[Result], metric: str) -> Difference | None:
    """A minus B of `metric` over the seeds that both have; None where they share no seed, or have no interval."""
    of_a, of_b = ({r.seed: r for r in rows if metric in r.metrics} for rows in (a, b))
    seeds = sorted(of_a.keys() & of_b.keys(), key=lambda seed: -1 if seed is None else seed)
    if not seeds:
        return None
    if len(seeds) > 1:
        found = compare_seeds([of_a[seed].metrics[metric].value - of_b[seed].metrics[metric].value for seed in seeds])
        return Difference(found.mean, found.lower, found.upper, len(seeds), "seeds")
    return _of_one_seed(of_a[seeds[0]], of_b[seeds[0]], metric)


def _of_one_seed(a: Result, b: Result, metric: str) -> Difference | None:
    ours, theirs = a.outcomes.get(metric), b.outcomes.get(metric)
    if ours is not None and theirs is not None and len(ours) == len(theirs):
        paired = compare_prompts(list(ours), list(theirs))
        return Difference(paired.difference, paired.lower, paired.upper, 1, "prompts", paired.p_value)
    return of_ends(a.metrics[metric], b.metrics[metric])


def of_ends(a: Measured, b: Measured) -> Difference | None:
    """The difference of two figures with its interval from theirs; None where one has no interval."""
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return None
    value = a.value - b.value
    low = value - math.hypot(a.value - a.low, b.high - b.value)
    high = value + math.hypot(a.high - a.value, b.value - b.low)
    return Difference(value, low, high, 1, "ends")


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
