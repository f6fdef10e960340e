"""Certificates in words: the sentence names exactly what was tested."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal

from holdfast.certification.share import Counted, ShareTest
from holdfast.core.percent import exact_percent

_UPWARDS = Context(prec=3, rounding=ROUND_CEILING)


@dataclass(frozen=True)
class Words:
    """A regression in words, and what the prompts come from.

    Attributes:
        regress: of several prompts: "degrade by more than 0.1 nats".
        regresses: of one: "degrades by more than 0.1 nats".
        source: follows "prompts": "from this source".
    """

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


def found(groups: Counted, rows: Counted, *, drawn: str = "groups", max_weight: int | None = None) -> str:
    """Returns the counts behind a claim."""
    prompts = f"{rows.regressions} of {rows.n}"
    if max_weight is not None:
        return f"{prompts} prompts did, in {groups.regressions} of {groups.n} groups"
    if drawn == "rows":
        return f"{prompts} did"
    return f"{groups.regressions} of {groups.n} groups did, {prompts} prompts"


def statement(test: ShareTest, words: Words | None = None, openings: int | None = None, claims: int = 1) -> str:
    """Returns claim and verdict of a test of one share as a sentence; its parts are openings unless these are given."""
    said = claim(test.alpha, words or Words(), drawn=test.drawn, max_weight=test.max_weight)
    counts = found(test.groups, test.rows, drawn=test.drawn, max_weight=test.max_weight)
    return verdict(
        test.certified, said, counts, test.upper_bound, confident(test.confidence, openings or test.parts, claims)
    )


def verdict(certified: bool, said: str, counts: str, upper_bound: float, at: str) -> str:
    """Returns the sentence of a claim that is shown, or is not."""
    shown = f"({counts}; upper bound {percent_up(upper_bound)})."
    return f"{at}, {said} {shown}" if certified else f"Not certified: that {said} is not shown {shown}"


def confident(confidence: float, openings: int = 1, claims: int = 1) -> str:
    """Returns how certain a claim is, as the beginning of a sentence."""
    at = f"With {exact_percent(confidence)} confidence"
    at += f" over {openings} openings" if openings > 1 else ""
    return at + (f" for {claims} claims together" if claims > 1 else "")


def percent_up(share: float) -> str:
    """A bound as a percentage of three significant digits at most, never rounded below itself."""
    return f"{_UPWARDS.multiply(Decimal(repr(share)), Decimal(100)).normalize():f} %"
