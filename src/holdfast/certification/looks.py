"""What a ledger knows of prompts: which ones it recognises, how often they were looked at, and their order.

A prompt is recognised by its id, by a hash of its text, or nearly, by hashes of its shingles (`sketches`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.certification.claim import Claim
from holdfast.certification.sketches import read_mark, seen, sketch
from holdfast.core.errors import InfeasibleError

# Kinds whose test an audit shows in full. A sequence is here since it refuses prompts that were audited before it.
SHOWN = ("fixed", "sequential")
State = Mapping[str, Any]
Texts = Mapping[str, str]


def note_marks(state: dict[str, Any], texts: Texts) -> None:
    """Put the marks of prompts into `state`."""
    for name, text in texts.items():
        mark = read_mark(text)
        state["texts"][name] = mark.text
        # The first sketch of a prompt stays: which shingles are common depends on the set it is opened in.
        if len(mark.hashes) and name not in state["sketches"]:
            state["sketches"][name] = sketch(mark.hashes)


def _marks(state: State, ids: Iterable[str], texts: Texts) -> dict[str, str]:
    """By what prompts are recognised, their ids and, where known, the hashes of their texts; to the id."""
    known: dict[str, str] = {}
    for name in ids:
        text = texts[name].partition(" ")[0] if name in texts else state["texts"].get(name)
        known |= {name: name} if text is None else {name: name, text: name}
    return known


def shared_prompts(state: State, ids: Sequence[str], texts: Texts, known: Iterable[str]) -> set[str]:
    """Those of the prompts `ids` that are among the `known` ones: by id, by text, or nearly."""
    mine, theirs = _marks(state, ids, texts), _marks(state, known, {})
    names = {name for mark, name in mine.items() if mark in theirs}
    now = {name: read_mark(texts[name]).hashes for name in ids if name in texts and name not in names}
    return names | seen(now, {name: state["sketches"][name] for name in known if name in state["sketches"]})


def _looks(
    state: State, openings: Sequence[State], ids: Sequence[str], texts: Texts, asked: set[str], shown: bool
) -> tuple[list[State], set[str]]:
    """The openings that share a prompt with these, and the audits that count.

    Where the claim's test is `shown` by an audit, one that asked what an opening asked (or `asked`) does not count.
    """
    looked = {entry["split"] for key in ("openings", "looks") for entry in state[key]}
    touched = {key for key in looked if shared_prompts(state, ids, texts, state["splits"][key])}
    openings = [entry for entry in openings if entry["split"] in touched]
    audits = {look["look"] for look in state["looks"] if look["split"] in touched}
    if shown:
        audits -= asked | {entry["look"] for entry in openings if entry["kind"] in SHOWN}
    return openings, audits


@dataclass(frozen=True, slots=True)
class Used:
    """How often prompts were looked at, how often that was declared (None: never), and by whom."""

    count: int
    declared: int | None
    by: tuple[str, ...]


def looks_used(state: State, ids: Sequence[str], texts: Texts) -> Used:
    """The looks that a claim which nobody has asked yet finds spent."""
    openings, audits = _looks(state, state["openings"], ids, texts, set(), True)
    runs = {entry["split"]: entry["run"] for entry in state["closed"]}
    by = [entry.get("label") or runs.get(entry["split"]) or "a certificate" for entry in openings]
    declared = min((entry["declared"] for entry in openings), default=None)
    return Used(len(openings) + len(audits), declared, (*by, *(["an audit"] * len(audits))))


def next_number(
    others: Sequence[State], state: State, claim: Claim, ids: Sequence[str], declared: int, texts: Texts
) -> int:
    """The number of this opening among all looks at these prompts; refuses one more than declared.

    An audit that asked what is claimed now, or what another opening asked, is no further look where it shows the whole
    test (`SHOWN`): after an audit, categories, a pool or a strength can still be chosen. The same claim on a larger or
    smaller set is one: to add prompts until a claim passes is to look again.
    """
    openings, audits = _looks(state, others, ids, texts, {claim.look}, claim.kind in SHOWN)
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


def continued(state: State, claim: Claim, ids: Sequence[str]) -> dict[str, Any] | None:
    """The opening of the same claim whose sequence `ids` repeats or continues: it grows at its end only."""
    entry: dict[str, Any]
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
        return entry
    return None


def require_order_unseen(
    others: Sequence[State], state: State, ids: Sequence[str], before: Sequence[str], texts: Texts
) -> None:
    """Refuse a sequence whose new prompts were looked at: put in order by outcome, any model would certify.

    Another sequence in the same order fixed it before anything was seen.
    """
    looks = [look["split"] for look in state["looks"]]
    for entry in others:
        if any(mine != theirs for mine, theirs in zip(ids, entry.get("sequence", [None]), strict=False)):
            looks.append(entry["split"])
    new, inside = ids[len(before) :], set(before)  # what is in the sequence may be looked at
    for key in looks:
        if shared_prompts(state, new, texts, [name for name in state["splits"][key] if name not in inside]):
            raise InfeasibleError(
                f"some of the last {len(new)} of {len(ids)} prompts were looked at before they came into this "
                "sequence: their order may depend on what was seen",
                remedy="append prompts that no audit or certificate has measured, or certify without --anytime",
            )
