"""Certificates in words: the sentence names exactly what was tested.

Certifying and verifying both call these functions, so that what is verified is what was computed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.certification.share import Counted, ShareTest
from holdfast.core.percent import exact_percent, percent_up


@dataclass(frozen=True)
class Words:
    """A regression of several prompts and of one, in words; and what follows "prompts", where they come from."""

    regress: str = "regress"
    regresses: str = "regresses"
    source: str = "from this source"


def claim(alpha: float, words: Words, *, drawn: str = "groups", max_weight: int | None = None) -> str:
    """Returns "at most alpha of ... regress" for the unit of the test."""
    limit = f"at most {exact_percent(alpha)}"
    if max_weight is not None:
        weight = f"where a group of near-duplicates weighs at most {max_weight}"
        return f"{limit} of prompts {words.source}, {weight}, {words.regress}"
    if drawn == "rows":
        return f"{limit} of prompts {words.source}, drawn one by one as its user asserts, {words.regress}"
    return f"{limit} of groups of near-duplicate prompts {words.source} have a prompt that {words.regresses}"


def counts(groups: Counted, rows: Counted, *, drawn: str = "groups", max_weight: int | None = None) -> str:
    prompts = f"{rows.regressions} of {rows.n}"
    if max_weight is not None:
        return f"{prompts} prompts did, in {groups.regressions} of {groups.n} groups"
    if drawn == "rows":
        return f"{prompts} did"
    return f"{groups.regressions} of {groups.n} groups did, {prompts} prompts"


def statement(test: ShareTest, words: Words | None = None, openings: int | None = None, claims: int = 1) -> str:
    """Returns claim and verdict of a test of one share as a sentence; its parts are openings unless these are given."""
    said = claim(test.alpha, words or Words(), drawn=test.drawn, max_weight=test.max_weight)
    counted = counts(test.groups, test.rows, drawn=test.drawn, max_weight=test.max_weight)
    at = confident(test.confidence, openings or test.parts, claims)
    return verdict(test.certified, said, counted, test.upper_bound, at)


def verdict(certified: bool, said: str, counts: str, upper_bound: float, at: str) -> str:
    """Returns the sentence of a claim that is shown, or is not."""
    shown = f"({counts}; upper bound {percent_up(upper_bound)})."
    return f"{at}, {said} {shown}" if certified else f"Not certified: that {said} is not shown {shown}"


def confident(confidence: float, openings: int = 1, claims: int = 1) -> str:
    at = f"With {exact_percent(confidence)} confidence"
    at += f" over {openings} openings" if openings > 1 else ""
    return at + (f" for {claims} claims together" if claims > 1 else "")


def words_of(by: str) -> Words | None:
    """The words of a claim; None: those of its unit."""
    if by != "log":
        return None
    passed = "of this task that passed in the log before"
    return Words("do not pass in the log after", "does not pass in the log after", passed)


def named_statement(
    statement: str, by: str, models: Mapping[str, str], bound: Mapping[str, Any], behaviour: Mapping[str, Any] | None,
    screening: Mapping[str, Any] | None = None,
) -> str:  # fmt: skip
    """`statement`, followed by the two models, the way they were compared, and how many prompts are public."""
    after, before = (f"{models[side]} (sha256 {bound[f'{side}_sha256'][:12]})" for side in ("after", "before"))
    said = f"{statement} Before: {before}; after: {after}. {_compared(by, behaviour)}"
    if screening is None:
        return said
    return f"{said} {screening['public']} of the {screening['prompts']} prompts ship with holdfast and are public."


def screened(screening: Mapping[str, Any]) -> str:
    """What screening found before training, in one line."""
    rows, conflicts, dropped = (screening[name] for name in ("rows", "conflicts", "dropped"))
    asked = "" if screening["asked_rows"] >= rows else f", {screening['asked_rows']} of them asked"
    return (
        f"screening: {rows} task rows{asked}; {conflicts} teach what the model before refuses, {dropped} of them were "
        f"dropped (conflicts: {screening['rule']})"
    )


def _compared(by: str, behaviour: Mapping[str, Any] | None) -> str:
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
