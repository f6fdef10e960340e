"""The certificate: a count of regressions, the exact test of it, and the claim in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any

from holdfast.certification import binomial, finite_pool
from holdfast.certification.arguments import confidence_level, count, rate, tally
from holdfast.certification.holm import adjusted
from holdfast.core.errors import DataError, InfeasibleError
from holdfast.core.percent import exact_percent

_UPWARDS = Context(prec=3, rounding=ROUND_CEILING)


@dataclass(frozen=True)
class Certificate:
    """Whether `regressions` of `n` prompts show that at most a share `alpha` regress.

    Attributes:
        alpha: the claimed share.
        confidence: 1 - delta, over all openings of the split together.
        n: independent prompts measured once, on a model fixed beforehand.
        regressions: those that regressed.
        test: "clopper-pearson", or "hypergeometric" for a sample from a known list.
        level: delta / openings, what this opening may spend.
        p_value: of H0 "more than alpha regress"; certified when it is at most the level.
        upper_bound: of the regressing share at confidence 1 - level; at most alpha exactly when certified.
        openings: how often the split may be opened, declared beforehand.
        pool: the size of the known list the prompts were drawn from; None for an open source.
    """

    alpha: float
    confidence: float
    n: int
    regressions: int
    test: str
    level: float
    p_value: float
    upper_bound: float
    openings: int = 1
    pool: int | None = None

    @property
    def certified(self) -> bool:
        """The verdict: p_value <= level."""
        return self.p_value <= self.level

    def statement(self, regress: str = "regress") -> str:
        """Returns the claim as one sentence; `regress` may say by how much: "degrade by more than 0.1 nats"."""
        source = "of prompts from this source" if self.pool is None else f"of the {self.pool} listed prompts"
        limit, bound = exact_percent(self.alpha), _percent_up(self.upper_bound)
        found = f"{self.regressions} of {self.n} did"
        if self.n == self.pool:
            relation = "At most" if self.certified else "More than"
            return f"{relation} {limit} {source} {regress}: all were measured, {found}."
        at = f"With {exact_percent(self.confidence)} confidence"
        if self.openings > 1:
            at += f" over {self.openings} openings"
        if self.certified:
            return f"{at}, at most {limit} {source} {regress} ({found}; upper bound {bound})."
        return f"Not certified: that at most {limit} {source} {regress} is not shown ({found}; upper bound {bound})."

    def to_json(self) -> dict[str, Any]:
        """Returns the fields by name, with the verdict and the statement."""
        return {**asdict(self), "certified": self.certified, "statement": self.statement()}


@dataclass(frozen=True)
class CategoryVerdict:
    """One category among several that were tested together.

    Attributes:
        p_value, adjusted_p: before and after Holm's correction; certified when adjusted_p is at most the level.
        upper_bound: simultaneous for all categories at the stated confidence; at most alpha exactly when certified.
        needed: the prompts without a regression that certify the category whatever the others show, where `n` is
            below it; else None.
    """

    n: int
    regressions: int
    p_value: float
    adjusted_p: float
    upper_bound: float
    certified: bool
    needed: int | None

    def to_json(self) -> dict[str, Any]:
        """Returns the fields by name."""
        return asdict(self)


def certify(
    regressions: int,
    n: int,
    alpha: float = 0.05,
    confidence: float = 0.95,
    *,
    openings: int = 1,
    pool: int | None = None,
) -> Certificate:
    """Tests "at most a share alpha of the prompts regress" on a count made once.

    Args:
        regressions: prompts that regressed among the `n` measured.
        n: independent prompts that played no part in training, tuning or selection.
        alpha: the share to certify.
        confidence: 1 - delta.
        openings: how often the split may be opened in all, declared beforehand; each opening gets delta / openings.
        pool: the size of the known list when the prompts were drawn from it without replacement.

    Raises:
        InfeasibleError: not even zero regressions among `n` prompts would certify; names the number needed.
    """
    k, n = tally(regressions, n)
    level = confidence_level(confidence, count("openings", openings, least=1))
    if pool is None:
        needed = binomial.fewest_prompts(alpha, confidence, parts=openings)
        _require_enough(n, needed, alpha, confidence, openings)
        p, bound = binomial.p_value(k, n, alpha), binomial.upper_bound(k, n, confidence, parts=openings)
    else:
        p = finite_pool.p_value(k, n, pool, alpha)
        needed = finite_pool.fewest_prompts(pool, alpha, confidence, parts=openings)
        _require_enough(n, needed, alpha, confidence, openings)
        bound = finite_pool.upper_count(k, n, pool, confidence, parts=openings) / pool
    test = "clopper-pearson" if pool is None else "hypergeometric"
    return Certificate(float(alpha), float(confidence), n, k, test, level, p, bound, int(openings), pool)


def certify_categories(
    counts: Mapping[str, tuple[int, int]], alpha: float = 0.05, confidence: float = 0.95, *, openings: int = 1
) -> dict[str, CategoryVerdict]:
    """Tests every category, {name: (regressions, n)}, with Holm's correction: any false verdict has P <= delta.

    The bounds fit the verdicts and hold together with them (Strassburger and Bretz 2008): categories that fail get
    the bound at level / (number of failed), categories that pass get alpha, or, when all pass, the bound at
    level / (number of categories) where that is lower.
    """
    if not counts:
        raise DataError("no categories, expected at least one", remedy="give every prompt a category")
    tallies = {name: (0, 0) if pair == (0, 0) else tally(*pair) for name, pair in counts.items()}
    alpha, level = rate("alpha", alpha), confidence_level(confidence, count("openings", openings, least=1))
    shares = openings * len(tallies)
    needed = binomial.fewest_prompts(alpha, confidence, parts=shares)
    _require_enough(max(n for _, n in tallies.values()), needed, alpha, confidence, shares, where="category")
    raw = {name: binomial.p_value(k, n, alpha) if n else 1.0 for name, (k, n) in tallies.items()}
    corrected = adjusted(raw)
    failed = sum(p > level for p in corrected.values())

    def bound(k: int, n: int, passed: bool) -> float:
        if passed and failed:
            return alpha
        if passed:
            return min(alpha, binomial.upper_bound(k, n, confidence, parts=shares))
        return binomial.upper_bound(k, n, confidence, parts=openings * failed) if n else 1.0

    return {
        name: CategoryVerdict(
            n=n,
            regressions=k,
            p_value=raw[name],
            adjusted_p=corrected[name],
            upper_bound=bound(k, n, corrected[name] <= level),
            certified=corrected[name] <= level,
            needed=needed if n < needed else None,
        )
        for name, (k, n) in tallies.items()
    }


def _require_enough(
    n: int, needed: int, alpha: float, confidence: float, shares: int, *, where: str | None = None
) -> None:
    if n >= needed:
        return
    among = f" shared among {shares} tests" if shares > 1 else ""
    place = f"the largest {where} has {n} prompts, which" if where else f"{n} prompts"
    raise InfeasibleError(
        f"{place} cannot certify alpha = {alpha:g} at confidence {confidence:g}{among}, even with no regression: "
        f"{needed} are needed",
        remedy=f"measure at least {needed} prompts{f' per {where}' if where else ''}, or choose a larger alpha; "
        "`holdfast plan` shows the choices",
    )


def _percent_up(share: float) -> str:
    """A bound as a percentage of three significant digits at most, never rounded below itself."""
    return f"{_UPWARDS.multiply(Decimal(repr(share)), Decimal(100)).normalize():f} %"
