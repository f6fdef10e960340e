"""The test of a share, of exactly what its sentence speaks of.

Near-duplicate prompts are not independent of one another, so a source is drawn group by group. F of the N prompts of a
group regress; the group does when F > 0.

| drawn, max_weight | the share of                                  | test at level delta / parts                 |
|-------------------|-----------------------------------------------|---------------------------------------------|
| groups            | groups with a prompt that regresses           | exact binomial over groups and over prompts |
| groups, c         | prompts, where a group of N weighs min(N, c)  | e-value over groups (`capped_weight`)       |
| rows              | prompts, drawn one by one as the user asserts | exact binomial over prompts                 |

Over groups alone, one group that holds most of the prompts could regress unnoticed; so both tests must pass. Nothing
certifies while the share of regressed prompts among those measured exceeds alpha: of the test over prompts that is no
rule of its own, since P(Bin(n, alpha) <= k) > 1/2 where k > alpha n; to the e-value it is added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

from holdfast.certification import binomial, capped_weight
from holdfast.certification.arguments import CEILING, confidence_level, count, exact, grid_alpha
from holdfast.core.errors import ConfigError, DataError

DRAWN = ("groups", "rows")
_LARGEST_LOG = 700.0  # exp stays finite


@dataclass(frozen=True)
class Counted:
    """How many of `n` regressed, and the test over them; without one, p_value and upper_bound are None."""

    n: int
    regressions: int
    p_value: float | None = None
    upper_bound: float | None = None


@dataclass(frozen=True)
class ShareTest:
    """Whether measured prompts show that a share is at most alpha, at level = (1 - confidence) / parts.

    `groups` and `rows` are counts of groups and of prompts, each with its test where the verdict rests on it. `p_value`
    is the smallest level that would certify: the larger of the tests', or with a max_weight 1/e_value. `upper_bound` is
    of the share that the sentence speaks of; at most alpha exactly when certified.
    """

    alpha: float
    confidence: float
    parts: int
    level: float
    drawn: str
    max_weight: int | None
    groups: Counted
    rows: Counted
    p_value: float
    upper_bound: float
    e_value: float | None

    @property
    def certified(self) -> bool:
        return self.p_value <= self.level

    @property
    def unit(self) -> Counted:
        """The independent units: groups, or prompts that were drawn one by one."""
        return self.rows if self.drawn == "rows" else self.groups


def share_test(
    failed: Sequence[bool] | NDArray[np.bool_], group: Sequence[int] | NDArray[np.int64], *, alpha: float,
    confidence: float = 0.95, parts: int = 1, drawn: str = "groups", max_weight: int | None = None,
) -> ShareTest:  # fmt: skip
    """Tests "at most a share alpha regresses" on prompts measured once.

    Args:
        failed: per prompt, whether it regressed.
        group: per prompt, a label of its group of near-duplicates.
        parts: the number of tests that share 1 - confidence: declared openings, categories, or both multiplied.
        drawn: `groups`, or `rows` where prompts were drawn one by one.
        max_weight: c, declared before the prompts were looked at.
    """
    cap = require_unit(drawn, max_weight)
    level, limit = confidence_level(confidence, parts), grid_alpha(alpha)
    sizes, bad = grouped(failed, group)
    groups = Counted(len(bad), int(np.count_nonzero(bad)))
    rows = Counted(int(sizes.sum()), int(bad.sum()))
    if cap is None:
        rows = _binomial(rows, limit, confidence, parts)
        groups = groups if drawn == "rows" else _binomial(groups, limit, confidence, parts)
        p = max(rows.p_value or 0.0, groups.p_value or 0.0)
        bound, e_value = max(rows.upper_bound or 0.0, groups.upper_bound or 0.0), None
    else:
        log_e = capped_weight.log_e_value(sizes, bad, cap, limit)
        e_value = math.exp(min(log_e, _LARGEST_LOG))
        p = capped_weight.p_value(sizes, bad, cap, limit)
        bound = capped_weight.upper_bound(sizes, bad, cap, confidence, parts=parts)
        p, bound = with_raw_share(p, bound, rows.regressions, rows.n, limit)
    return ShareTest(float(alpha), float(confidence), int(parts), level, drawn, cap, groups, rows, p, bound, e_value)


def _binomial(counted: Counted, alpha: float, confidence: float, parts: int) -> Counted:
    k, n = counted.regressions, counted.n
    return Counted(n, k, binomial.p_value(k, n, alpha), binomial.upper_bound(k, n, confidence, parts=parts))


def with_raw_share(p_value: float, upper_bound: float, regressions: int, n: int, alpha: float) -> tuple[float, float]:
    """Returns a test's p-value and bound when it may not certify while regressions / n > alpha, in decimals."""
    if regressions <= exact(alpha) * n:
        return p_value, upper_bound
    return 1.0, max(upper_bound, float(CEILING.divide(Decimal(regressions), Decimal(n))))


def grouped(
    failed: Sequence[bool] | NDArray[np.bool_], group: Sequence[int] | NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the number of prompts and of regressed prompts of each group."""
    outcome, label = np.asarray(failed), np.asarray(group)
    if outcome.ndim != 1 or outcome.shape != label.shape or outcome.size == 0:
        raise DataError(
            f"outcomes of shape {outcome.shape} and groups of shape {label.shape}, expected two vectors of one length",
            remedy="pass one outcome and one group for each prompt, and at least one prompt",
        )
    if outcome.dtype != np.bool_:
        raise DataError(
            f"outcomes are {outcome.dtype}, expected truth values", remedy="pass True for a prompt that regressed"
        )
    _, place = np.unique(label, return_inverse=True)
    return np.bincount(place), np.bincount(place[outcome], minlength=int(place.max()) + 1)


def require_unit(drawn: str, max_weight: int | None) -> int | None:
    """Returns the largest weight if unit and weight are known and fit together."""
    if drawn not in DRAWN:
        raise ConfigError(
            f"drawn = {drawn!r}, expected groups or rows",
            remedy="use groups, or rows if the prompts were drawn one by one, independently of one another",
        )
    if max_weight is None:
        return None
    if drawn == "rows":
        raise ConfigError(
            "drawn = 'rows' with a max_weight: prompts that were drawn one by one have no groups to weigh",
            remedy="leave out one of the two",
        )
    return count("max_weight", max_weight, least=1)
