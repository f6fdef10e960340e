"""The statement of a certificate: the claim and its verdict, both models by name and content, and what was compared.

Certifying and verifying both call these functions, so that what is verified is what was computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.certification.assessment import assess
from holdfast.certification.behaviour import Claimed, Classes, assess_classes
from holdfast.certification.statement import Words
from holdfast.certification.terms import Rows, Terms

SHOWN = 12  # digits of a sha256
_PASSES = Words(
    regress="do not pass in the log after",
    regresses="does not pass in the log after",
    source="of this task that passed in the log before",
)


def words_of(by: str) -> Words | None:
    """The words of a claim; None: those of its unit."""
    return _PASSES if by == "log" else None


def assessed(table: Rows | Classes, terms: Terms, claims: Sequence[Claimed]) -> dict[str, Any]:
    """The fields of a certificate that follow from its table."""
    if isinstance(table, Classes):
        return assess_classes(table, terms, claims)
    return assess(table, terms) | {"also": None, "behaviour": None}


def named_statement(
    statement: str,
    by: str,
    models: Mapping[str, str],
    bound: Mapping[str, Any],
    behaviour: Mapping[str, Any] | None,
    screening: Mapping[str, Any] | None = None,
) -> str:
    """`statement`, followed by the two models, the way they were compared, and how many prompts are public."""
    after, before = (f"{models[side]} (sha256 {bound[f'{side}_sha256'][:SHOWN]})" for side in ("after", "before"))
    said = f"{statement} Before: {before}; after: {after}. {compared(by, behaviour)}"
    return said if screening is None else f"{said} {public(screening)}"


def public(screening: Mapping[str, Any]) -> str:
    """How many of the prompts everybody has: whoever trained the model could have read them."""
    return f"{screening['public']} of the {screening['prompts']} prompts ship with holdfast and are public."


def screened(screening: Mapping[str, Any]) -> str:
    """What screening found before training, in one line."""
    rows, conflicts, dropped = (screening[name] for name in ("rows", "conflicts", "dropped"))
    asked = "" if screening["asked_rows"] >= rows else f", {screening['asked_rows']} of them asked"
    return (
        f"screening: {rows} task rows{asked}; {conflicts} teach what the model before refuses, {dropped} of them were "
        f"dropped (conflicts: {screening['rule']})"
    )


def compared(by: str, behaviour: Mapping[str, Any] | None) -> str:
    """How the models were compared, and what that leaves open."""
    if by == "behaviour" and behaviour is not None:
        rules = behaviour["rules"]
        return (
            f"Greedy replies of at most {behaviour['max_new_tokens']} tokens, {behaviour['engine']} in "
            f"{behaviour['dtype']}, sorted by {rules['name']} revision {rules['revision']}; "
            f"{behaviour['unclear']} of {behaviour['prompts']} prompts unclear."
        )
    if by == "harm":
        return "Greedy replies, as the judge sees them."
    if by == "log":
        return "As two evaluation logs say; the models were not seen."
    return "A steering figure: what the models write was not looked at, and a model can keep this and stop refusing."
