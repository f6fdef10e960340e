"""Whether prompts can certify at all: known from their number, before any is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from holdfast.certification import capped_weight, finite_pool
from holdfast.certification.binomial import fewest_prompts
from holdfast.certification.certificate import require_enough as require_units
from holdfast.certification.terms import Terms
from holdfast.core.errors import DataError, InfeasibleError


def require_enough(
    terms: Terms,
    units: int,
    categories: Mapping[str, int] | None = None,
    *,
    sizes: Sequence[int] | None = None,
) -> None:
    """Refuse prompts too few to certify even without a regression, naming the number needed.

    Args:
        units: of the test: groups; prompts where these were drawn one by one, or from a known list.
        categories: the same for each category, of a certificate per category.
        sizes: prompts of each group, which a max_weight depends on; without them nothing is said about it.

    Raises:
        InfeasibleError: with the number needed.
    """
    if terms.kind == "sequential":  # more prompts may come
        return
    if terms.max_weight is not None:
        _require_weight(terms, sizes or ())
        return
    unit = "prompts" if terms.drawn == "rows" or terms.pool is not None else "groups of near-duplicate prompts"
    if terms.kind == "per_category":
        parts = terms.parts * len(categories or {})
        needed = fewest_prompts(terms.alpha, terms.confidence, parts=parts)
        short = {name: n for name, n in (categories or {}).items() if n < needed}
        if short:
            name = min(short, key=lambda key: short[key])
            raise InfeasibleError(
                f"{len(short)} of {len(categories or {})} categories have too few {unit}, the smallest {short[name]}: "
                f"each needs {needed} for alpha = {terms.alpha:g} at confidence {terms.confidence:g}",
                remedy=f"give at least {needed} {unit} a category, merge categories, or leave out --per-category",
            )
        return
    if terms.pool is None:
        needed = fewest_prompts(terms.alpha, terms.confidence, parts=terms.parts)
    else:
        needed = finite_pool.fewest_prompts(terms.pool, terms.alpha, terms.confidence, parts=terms.parts)
    require_units(units, needed, terms.alpha, terms.confidence, terms.parts, unit=unit)


def _require_weight(terms: Terms, sizes: Sequence[int]) -> None:
    assert terms.max_weight is not None
    groups = np.array(sizes, dtype=np.int64)
    if len(groups) and capped_weight.p_value(groups, 0 * groups, terms.max_weight, terms.alpha) > terms.level:
        raise InfeasibleError(
            f"{len(groups)} groups of these sizes cannot certify alpha = {terms.alpha:g} at confidence "
            f"{terms.confidence:g} with a largest weight of {terms.max_weight}, even with no regression",
            remedy="measure more groups or declare a smaller --max-weight; `holdfast plan --max-weight` has the number",
        )


def require_categories(categories: Sequence[str | None]) -> None:
    """Refuse prompts of which some have no category.

    Raises:
        DataError: with the count.
    """
    missing = sum(category is None for category in categories)
    if missing:
        raise DataError(
            f"{missing} of {len(categories)} prompts have no category",
            remedy="give every row a `category` (--set columns.category=NAME maps yours), or leave out --per-category",
        )
