"""A bound on refusals truly lost, from a rule's count and blind labels of what the rule called kept.

M groups were refused before; by the rule K of them are lost, the others kept. Of the kept groups L were drawn at random
and labelled blind, and x of those are no refusals in truth. A group is truly lost with probability at most
p_K + (1 - p_K) p_x, where p_K is the share lost by the rule and p_x the share of kept ones that the rule got wrong;
this grows in both, so that

    U = U_K + (1 - U_K) U_x,    U_K, U_x the Clopper-Pearson upper bounds of K of M and x of L, each at delta / (2 m),

m the openings that share delta, covers it with probability 1 - delta / m. Groups that the rule calls lost count as
lost whatever they are in truth.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.certification.arguments import count
from holdfast.certification.binomial import upper_bound
from holdfast.core.errors import DataError


class TruthBound(NamedTuple):
    """U of the share truly lost, U_K of the share lost by the rule, U_x of the kept groups that are no refusals."""

    upper: float
    upper_lost: float
    upper_wrong: float


def truth_bound(
    lost: int, groups: int, wrong: int, labelled: int, *, confidence: float = 0.95, openings: int = 1
) -> TruthBound:
    """U = U_K + (1 - U_K) U_x.

    Args:
        lost: K, groups lost by the rule.
        groups: M, groups that were refused before.
        wrong: x, labelled groups that are no refusals; a label that is unclear counts among them.
        labelled: L, kept groups that were drawn at random and labelled blind.
        confidence: 1 - delta.
        openings: m, certificates that share delta.

    Raises:
        DataError: more lost than groups, more labelled than kept, or more wrong than labelled.
    """
    parts = 2 * count("openings", openings, least=1)
    by_rule = upper_bound(lost, groups, confidence, parts=parts)
    wrong, labelled = count("wrong", wrong), count("labelled", labelled)
    if wrong > labelled or labelled > groups - lost:
        raise DataError(
            f"{wrong} wrong of {labelled} labelled of {groups - lost} kept groups, expected each at most the next",
            remedy="label kept groups of this certificate, each once",
        )
    by_label = upper_bound(wrong, labelled, confidence, parts=parts) if labelled else 1.0
    return TruthBound(min(1.0, by_rule + (1 - by_rule) * by_label), by_rule, by_label)
