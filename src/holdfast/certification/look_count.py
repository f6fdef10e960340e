"""Counting the looks at prompts: openings of certificates, and audits that asked something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.certification.claim import Claim
from holdfast.certification.recognition import touching
from holdfast.core.errors import InfeasibleError

# Kinds whose test an audit shows in full. A sequence is here since it refuses prompts that were audited before it.
SHOWN = ("fixed", "sequential")


@dataclass(frozen=True, slots=True)
class Used:
    """How often prompts were looked at, how often that was declared (None: never), and by whom."""

    count: int
    declared: int | None
    by: tuple[str, ...]


def looks_used(state: Mapping[str, Any], ids: Sequence[str], texts: Mapping[str, str]) -> Used:
    """The looks that a claim which nobody has asked yet finds spent."""
    touched = touching(state, ids, texts)
    openings = [entry for entry in state["openings"] if entry["split"] in touched]
    audits = _audits(state, openings, touched, set(), True)
    runs = {entry["split"]: entry["run"] for entry in state["closed"]}
    by = [entry.get("label") or runs.get(entry["split"]) or "a certificate" for entry in openings]
    declared = min((entry["declared"] for entry in openings), default=None)
    return Used(len(openings) + len(audits), declared, (*by, *(["an audit"] * len(audits))))


def _audits(
    state: Mapping[str, Any],
    openings: Sequence[Mapping[str, Any]],
    touched: set[str],
    asked: set[str],
    shown: bool,
) -> set[str]:
    """The audits that count: where the claim's test is `shown` by one, not those that asked what an opening asked."""
    audits = {look["look"] for look in state["looks"] if look["split"] in touched}
    if not shown:
        return audits
    return audits - asked - {entry["look"] for entry in openings if entry["kind"] in SHOWN}


def next_number(
    others: Sequence[Mapping[str, Any]],
    state: Mapping[str, Any],
    claim: Claim,
    ids: Sequence[str],
    declared: int,
    texts: Mapping[str, str],
) -> int:
    """The number of this opening among all looks at these prompts; refuses one more than declared.

    An audit that asked what is claimed now, or what another opening asked, is no further look where it shows the whole
    test (`SHOWN`): after an audit, categories, a pool or a strength can still be chosen. The same claim on a larger or
    smaller set is one: to add prompts until a claim passes is to look again.
    """
    touched = touching(state, ids, texts)
    openings = [entry for entry in others if entry["split"] in touched]
    audits = _audits(state, openings, touched, {claim.look}, claim.kind in SHOWN)
    used = len(openings) + len(audits)
    allowed = min([declared, *(entry["declared"] for entry in openings)])
    if used + 1 > allowed:
        raise InfeasibleError(
            f"these {len(ids)} prompts, or some of them, were looked at {counted(used, 'time')} before "
            f"(certificates: {len(openings)}, audits that count: {len(audits)}), and the number of openings declared "
            f"is {allowed}: an undeclared opening never certifies",
            remedy="use fresh prompts; next time declare the openings beforehand (--openings m, safety.openings: m)",
        )
    return used + 1


def counted(count: int, noun: str) -> str:
    """A number with its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
