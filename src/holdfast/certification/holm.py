"""Holm's step-down correction: several claims tested at once, any dependence between them."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.certification.arguments import number
from holdfast.core.errors import DataError


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
    largest, found = 0.0, {}
    for place, name in enumerate(sorted(p_values, key=lambda key: p_values[key])):
        largest = max(largest, min(1.0, (len(p_values) - place) * float(p_values[name])))
        found[name] = largest
    return {name: found[name] for name in p_values}
