"""A sequence of prompts in the ledger: it grows at its end only, by prompts that nothing has looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.certification.claim import Claim
from holdfast.certification.recognition import shared_prompts
from holdfast.core.errors import InfeasibleError


def continued(state: Mapping[str, Any], claim: Claim, ids: Sequence[str]) -> dict[str, Any] | None:
    """The opening of the same claim whose sequence `ids` repeats or continues."""
    for entry in state["openings"]:
        before = entry.get("sequence", [])
        if entry["claim"] != claim.sha256 or not set(before) & set(ids):
            continue
        if list(ids[: len(before)]) != before:
            raise InfeasibleError(
                f"the prompts do not continue the {len(before)} that were opened before: expected these first, in "
                "their order, and new ones after them",
                remedy="restore the order and the removed prompts, and append new ones at the end",
            )
        found: dict[str, Any] = entry
        return found
    return None


def require_order_unseen(
    others: Sequence[Mapping[str, Any]],
    state: Mapping[str, Any],
    ids: Sequence[str],
    before: Sequence[str],
    texts: Mapping[str, str],
) -> None:
    """Refuse a sequence whose new prompts were looked at: put in order by outcome, any model would certify.

    Another sequence in the same order fixed it before anything was seen.
    """
    looks = [look["split"] for look in state["looks"]]
    for entry in others:
        if any(mine != theirs for mine, theirs in zip(ids, entry.get("sequence", [None]), strict=False)):
            looks.append(entry["split"])
    new = ids[len(before) :]
    inside = set(before)  # what is in the sequence may be looked at
    if any(
        shared_prompts(state, new, texts, [name for name in state["splits"][key] if name not in inside])
        for key in looks
    ):
        raise InfeasibleError(
            f"some of the last {len(new)} of {len(ids)} prompts were looked at before they came into this sequence: "
            "their order may depend on what was seen",
            remedy="append prompts that no audit or certificate has measured, or certify without --anytime",
        )
