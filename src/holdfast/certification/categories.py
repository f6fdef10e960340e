"""A share tested in every category at once: the test of `share` in each, Holm's step-down correction over all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from holdfast.certification import binomial
from holdfast.certification.arguments import confidence_level, count, number, rate
from holdfast.certification.certificate import require_enough
from holdfast.certification.share import Counted, share_test
from holdfast.core.errors import DataError

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
