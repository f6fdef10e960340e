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

Shares of several categories are tested each, with Holm's step-down correction over all.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from holdfast.certification import binomial, capped_weight
from holdfast.certification.arguments import CEILING, confidence_level, count, exact, grid_alpha, number, rate
from holdfast.certification.blocks import CategoryFigures, Counts
from holdfast.core.errors import ConfigError, DataError, InfeasibleError

DRAWN = ("groups", "rows")
_LARGEST_LOG = 700.0  # exp stays finite


@dataclass(frozen=True)
class Counted:
    """How many of `n` regressed, and the test over them; without one, p_value and upper_bound are None."""

    n: int
    regressions: int
    p_value: float | None = None
    upper_bound: float | None = None

    def to_json(self) -> Counts:
        return {
            "n": self.n, "regressions": self.regressions, "p_value": self.p_value, "upper_bound": self.upper_bound,
        }  # fmt: skip


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
    groups, rows = Counted(len(bad), int(np.count_nonzero(bad))), Counted(int(sizes.sum()), int(bad.sum()))
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
        what = f"outcomes are {outcome.dtype}, expected truth values"
        raise DataError(what, remedy="pass True for a prompt that regressed")
    _, place = np.unique(label, return_inverse=True)
    return np.bincount(place), np.bincount(place[outcome], minlength=int(place.max()) + 1)


def require_unit(drawn: str, max_weight: int | None) -> int | None:
    """Returns the largest weight if unit and weight are known and fit together."""
    if drawn not in DRAWN:
        remedy = "use groups, or rows if the prompts were drawn one by one, independently of one another"
        raise ConfigError(f"drawn = {drawn!r}, expected groups or rows", remedy=remedy)
    if max_weight is not None and drawn == "rows":
        what = "drawn = 'rows' with a max_weight: prompts that were drawn one by one have no groups to weigh"
        raise ConfigError(what, remedy="leave out one of the two")
    return None if max_weight is None else count("max_weight", max_weight, least=1)


def require_enough(n: int, needed: int, alpha: float, confidence: float, shares: int, *, unit: str = "prompts") -> None:
    """Refuse fewer units than the `needed` that certify without a regression; `shares` tests share 1 - confidence."""
    if n >= needed:
        return
    among = f" shared among {shares} tests" if shares > 1 else ""
    raise InfeasibleError(
        f"{n} {unit} cannot certify alpha = {alpha:g} at confidence {confidence:g}{among}, even with no regression: "
        f"{needed} are needed",
        remedy=f"measure at least {needed} {unit}, or choose a larger alpha; `holdfast plan` shows the choices",
    )


Measured: TypeAlias = tuple[Sequence[bool] | NDArray[np.bool_], Sequence[int] | NDArray[np.int64]]


@dataclass(frozen=True)
class CategoryVerdict:
    """One category among several that were tested together; `n` and `regressions` count units of the test.

    `p_value` and the tests of `groups` and `rows` are before Holm's correction; certified when adjusted_p is at most
    the level. `upper_bound` is simultaneous for all categories; at most alpha exactly when certified. `needed` units
    without a regression certify the category whatever the others show, where `n` is below that; else, and with a
    max_weight, where it depends on the sizes of groups, None.
    """

    n: int
    regressions: int
    groups: Counted
    rows: Counted
    p_value: float
    adjusted_p: float
    upper_bound: float
    certified: bool
    needed: int | None

    def to_json(self) -> CategoryFigures:
        return {
            "n": self.n, "regressions": self.regressions, "groups": self.groups.to_json(), "rows": self.rows.to_json(),
            "p_value": self.p_value, "adjusted_p": self.adjusted_p, "upper_bound": self.upper_bound,
            "certified": self.certified, "needed": self.needed,
        }  # fmt: skip


def adjusted(p_values: Mapping[str, float]) -> dict[str, float]:
    """Returns the adjusted p-values, keyed and ordered as given.

    With p_(1) <= ... <= p_(m): adjusted p_(i) = max over j <= i of min(1, (m - j + 1) p_(j)). Rejecting those at most
    delta makes a false rejection among all m with probability at most delta.
    """
    if not p_values:
        raise DataError("no p-values, expected at least one", remedy="pass one p-value per claim")
    for name, p in p_values.items():
        if not 0 <= number(p) <= 1:
            raise DataError(f"p-value of {name!r} is {p!r}, expected 0 <= p <= 1", remedy="pass p-values")
    largest, corrected = 0.0, {}
    for place, name in enumerate(sorted(p_values, key=lambda key: p_values[key])):
        largest = max(largest, min(1.0, (len(p_values) - place) * float(p_values[name])))
        corrected[name] = largest
    return {name: corrected[name] for name in p_values}


def certify_categories(
    measured: Mapping[str, Measured], alpha: float = 0.05, confidence: float = 0.95, *, openings: int = 1,
    drawn: str = "groups", max_weight: int | None = None,
) -> dict[str, CategoryVerdict]:  # fmt: skip
    """Tests every category, {name: (failed, group)}, with Holm's correction: any false verdict has P <= delta.

    The bounds fit the verdicts and hold together with them (Strassburger and Bretz 2008): categories that fail get
    the bound at level / (number of failed), categories that pass get alpha, or, when all pass, the bound at
    level / (number of categories) where that is lower. Refused where the largest category has too few units.
    """
    if not measured:
        raise DataError("no categories, expected at least one", remedy="give every prompt a category")
    alpha, level = rate("alpha", alpha), confidence_level(confidence, count("openings", openings, least=1))
    test = partial(share_test, alpha=alpha, confidence=confidence, drawn=drawn, max_weight=max_weight)
    alone = {name: test(*pair, parts=openings) for name, pair in measured.items()}
    shares, needed = openings * len(alone), 0
    if max_weight is None:
        needed = binomial.fewest_prompts(alpha, confidence, parts=shares)
        most, unit = max(one.unit.n for one in alone.values()), "prompts" if drawn == "rows" else "groups"
        require_enough(most, needed, alpha, confidence, shares, unit=f"{unit} in a category")
    corrected = adjusted({name: one.p_value for name, one in alone.items()})
    failed = sum(p > level for p in corrected.values())

    def bound(name: str, passed: bool) -> float:
        if passed and failed:
            return alpha
        if passed:
            return min(alpha, test(*measured[name], parts=shares).upper_bound)
        return test(*measured[name], parts=openings * failed).upper_bound

    return {
        name: CategoryVerdict(
            one.unit.n, one.unit.regressions, one.groups, one.rows, one.p_value, corrected[name],
            upper_bound=bound(name, corrected[name] <= level), certified=corrected[name] <= level,
            needed=needed if one.unit.n < needed else None,
        )
        for name, one in alone.items()
    }  # fmt: skip
