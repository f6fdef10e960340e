"""The ledger of looks at certify prompts: how often they may be opened, and which claims they were opened for.

A certify split speaks with confidence 1 - delta only if it was not used to choose what is claimed. It therefore
declares, when it is first opened, how often that may happen: m openings get delta / m each. An opening is a claim
(two models, unit, tau, alpha, confidence, how it was measured) on a set of prompts, and is entered before anything is
measured, so that a look that ended badly counts too.

- The same claim on the same prompts is the same opening.
- Every other claim on these prompts, or on a set that shares a prompt with them, is another one; so is an audit of
  them (`record_look`), unless it asked what a fixed certificate asks: the same models, measured in the same way.
- One more than declared is refused. Where sets overlap, the smallest number declared among them holds.
- A sequence of prompts that arrive over time is one opening, whose prompts may only grow at the end, by prompts that
  nothing has looked at: their order must not depend on outcomes.

A prompt is shared when its id or its normalised text is: another completion, case or spacing makes no fresh prompt.
The file holds ids and hashes, never text; prompts that are only similar are therefore not seen as shared.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.certification.arguments import confidence_level
from holdfast.certification.claim import Claim
from holdfast.core.errors import CheckpointError, ConfigError, DataError, InfeasibleError
from holdfast.core.file_lock import locked
from holdfast.core.files import read_json, write_json
from holdfast.core.hashing import sha256_lines

VERSION = 1
ENDING = ".openings.json"
# Kinds whose test an audit shows in full. A sequence is here since it refuses prompts that were audited before it.
SHOWN = ("fixed", "sequential")


@dataclass(frozen=True, slots=True)
class Opening:
    """One entry of the ledger: number `number` of `declared`."""

    declared: int
    number: int
    claim: str
    split_sha256: str

    def level(self, confidence: float) -> float:
        """The share of delta = 1 - confidence that this opening may spend: delta / m."""
        return confidence_level(confidence, self.declared)


def split_sha256(ids: Sequence[str]) -> str:
    """sha256 of the sorted ids, as in a run's splits.json."""
    return sha256_lines(sorted(ids))


def default_ledger(source: str) -> Path:
    """Where the openings of a safety source are written: beside a local file, else in holdfast's cache.

    The cache holds one ledger for all data, so that a set shared by two sources is still seen. It is also that of
    files in the cache: two draws of the protocol's roles are two files with many prompts in common.
    """
    path = Path(source).expanduser()
    root = Path(os.environ.get("HOLDFAST_CACHE") or Path.home() / ".cache" / "holdfast").expanduser()
    if path.is_file() and root.resolve() not in path.resolve().parents:
        path = path.resolve()
        beside = path.with_name(path.name + ENDING)
        if os.access(path.parent, os.W_OK) or beside.exists():
            return beside
    return root / "openings" / f"ledger{ENDING}"


class Ledger:
    """The openings written in one file.

    Args:
        path: of the file; made at the first entry.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(
        self,
        claim: Claim,
        ids: Sequence[str],
        *,
        declared: int | None = None,
        sequential: bool = False,
        texts: Mapping[str, str] | None = None,
    ) -> Opening:
        """What `open` would return or refuse, with nothing written."""
        return _enter(_read(self.path), claim, ids, declared, sequential, texts or {})

    def open(
        self,
        claim: Claim,
        ids: Sequence[str],
        *,
        declared: int | None = None,
        sequential: bool = False,
        texts: Mapping[str, str] | None = None,
    ) -> Opening:
        """Enter an opening, unless this very one is there already.

        Args:
            claim: what is asked.
            ids: of the prompts; for `sequential` in the order in which they arrived.
            declared: how often these prompts may be opened; None takes what was declared, or 1.
            sequential: the prompts may grow at the end without a new opening.
            texts: by id, a hash of the prompt's normalised text.

        Raises:
            ConfigError: another number of openings was declared before.
            InfeasibleError: all declared openings are used, or the sequence was changed.
            CheckpointError: the ledger is damaged.
        """
        with locked(self.path):
            state = _read(self.path)
            found = _enter(state, claim, ids, declared, sequential, texts or {})
            write_json(self.path, state)
        return found

    def record_look(self, look: str, ids: Sequence[str], *, texts: Mapping[str, str] | None = None) -> None:
        """Enter an audit of these prompts (`look_sha256`): it counts when something else is certified on them.

        Args:
            texts: by id, a hash of the prompt's normalised text, as for `open`.
        """
        _require_ids(ids)
        entry = {"split": split_sha256(ids), "look": look}
        with locked(self.path):
            state = _read(self.path)
            known = state.get("texts", {})
            if entry not in state["looks"] or not (texts or {}).items() <= known.items():
                state["splits"].setdefault(entry["split"], sorted(ids))
                state["looks"] = [*(one for one in state["looks"] if one != entry), entry]
                state["texts"] = {**known, **(texts or {})}
                write_json(self.path, state)

    def settle(self, claim: str, ids: Sequence[str], outcome: Sequence[str]) -> None:
        """Keep what an opening came to, where measuring again may come to something else; the first outcome stands.

        Args:
            claim: its sha256.
            ids: the prompts of the opening.
            outcome: one text a row, in the order of the rows. Later outcomes may only continue it: a sequence grows.

        Raises:
            InfeasibleError: it came to something else before.
        """
        with locked(self.path):
            state = _read(self.path)
            entry = _same(state, claim, split_sha256(ids))
            if entry is None:
                raise CheckpointError(f"{self.path} holds no opening of this claim", remedy="certify again")
            rows, first = entry.get("outcome", [0, ""])
            if len(outcome) < rows or (rows and sha256_lines(outcome[:rows]) != first):
                raise InfeasibleError(
                    f"the same question about these {len(ids)} prompts had another answer before: {self.path} holds "
                    "its hash, and to ask until an answer pleases certifies nothing",
                    remedy="use the first certificate; where it is lost, use fresh prompts",
                )
            entry["outcome"] = [len(outcome), sha256_lines(outcome)]
            write_json(self.path, state)

    def find(self, claim: str, ids: Sequence[str]) -> Opening | None:
        """The opening of a claim (its sha256) on these prompts; None when it was never entered.

        Of a sequence the prompts may be those at its start: a certificate stays true when the sequence grows.
        """
        key = split_sha256(ids)
        for entry in _read(self.path)["openings"]:
            start = entry.get("sequence", [])[: len(ids)]
            if entry["claim"] == claim and (entry["split"] == key or start == list(ids)):
                return Opening(entry["declared"], entry["number"], claim, key)
        return None


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"version": VERSION, "splits": {}, "openings": [], "looks": []}
    state = read_json(path)
    if not isinstance(state, dict) or state.get("version") != VERSION or not _sound(state):
        raise CheckpointError(
            f"{path} is not a ledger of openings, version {VERSION}, or is damaged",
            remedy="restore it from a backup: without it nobody knows how often the prompts were opened",
        )
    return state


def _sound(state: Mapping[str, Any]) -> bool:
    """Whether all parts are there and every set of ids has the hash it is filed under."""
    try:
        named = [entry["split"] for entry in [*state["openings"], *state["looks"]]]
        numbers = [entry[key] for entry in state["openings"] for key in ("declared", "number")]
        texts = [entry[key] for entry in state["openings"] for key in ("claim", "look", "kind")]
        return (
            isinstance(state.get("texts", {}), dict)
            and all(split_sha256(ids) == key for key, ids in state["splits"].items())
            and set(named) <= set(state["splits"])
            and all(isinstance(number, int) and number >= 1 for number in numbers)
            and all(isinstance(text, str) for text in [*texts, *(look["look"] for look in state["looks"])])
        )
    except (KeyError, TypeError, AttributeError):
        return False


def _enter(
    state: dict[str, Any],
    claim: Claim,
    ids: Sequence[str],
    declared: int | None,
    sequential: bool,
    texts: Mapping[str, str],
) -> Opening:
    """Put the opening into `state`, or raise; an opening that is there stays as it is."""
    _require_ids(ids)
    state["texts"] = {**state.get("texts", {}), **texts}
    if declared is not None and (isinstance(declared, bool) or not isinstance(declared, int) or declared < 1):
        raise ConfigError(f"openings is {declared!r}; expected a whole number >= 1", remedy="leave it out for 1")
    key = split_sha256(ids)
    entry = _continued(state, claim, ids) if sequential else _same(state, claim.sha256, key)
    same = [other["declared"] for other in state["openings"] if other["split"] == key]
    stored = entry["declared"] if entry is not None else (same[0] if same else None)
    if declared is not None and stored not in (None, declared):
        raise ConfigError(
            f"these prompts declared {_counted(stored, 'opening')} when they were first opened; now {declared}",
            remedy=f"leave --openings (safety.openings) at {stored}, or use fresh prompts",
        )
    if entry is None or entry["split"] != key:
        others = [other for other in state["openings"] if other is not entry]
        allowed = stored or declared or 1
        number = _next_number(others, state, claim, ids, allowed)
        if sequential:
            _require_order_unseen(others, state, ids, [] if entry is None else entry["sequence"])
        if entry is None:
            entry = {"declared": allowed, "number": number, "claim": claim.sha256, "look": claim.look}
            entry["kind"] = claim.kind
            state["openings"].append(entry)
        entry["split"] = key
    if sequential:
        entry["sequence"] = list(ids)
    state["splits"][key] = sorted(ids)
    return Opening(entry["declared"], entry["number"], entry["claim"], key)


def _require_ids(ids: Sequence[str]) -> None:
    if not ids or len(set(ids)) != len(ids):
        raise DataError(
            f"{len(ids)} prompts with {len(set(ids))} different ids cannot be opened; expected different prompts",
            remedy="give at least one prompt, each once",
        )


def _same(state: Mapping[str, Any], claim: str, split: str) -> dict[str, Any] | None:
    found = (entry for entry in state["openings"] if (entry["claim"], entry["split"]) == (claim, split))
    return next(found, None)


def _continued(state: Mapping[str, Any], claim: Claim, ids: Sequence[str]) -> dict[str, Any] | None:
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


def _marks(state: Mapping[str, Any], ids: Sequence[str]) -> set[str]:
    """What prompts are recognised by: their ids and, where known, the hashes of their texts."""
    texts = state.get("texts", {})
    return {*ids, *(texts[name] for name in ids if name in texts)}


def _require_order_unseen(
    others: Sequence[Mapping[str, Any]], state: Mapping[str, Any], ids: Sequence[str], before: Sequence[str]
) -> None:
    """Refuse a sequence whose new prompts were looked at: put in order by outcome, any model would certify.

    Another sequence in the same order fixed it before anything was seen.
    """
    looks = [look["split"] for look in state["looks"]]
    for entry in others:
        if any(mine != theirs for mine, theirs in zip(ids, entry.get("sequence", [None]), strict=False)):
            looks.append(entry["split"])
    new = ids[len(before) :]
    seen = _marks(state, new) & {mark for key in looks for mark in _marks(state, state["splits"][key])}
    if seen:
        raise InfeasibleError(
            f"some of the last {len(new)} of {len(ids)} prompts were looked at before they came into this sequence: "
            "their order may depend on what was seen",
            remedy="append prompts that no audit or certificate has measured, or certify without --anytime",
        )


def _next_number(
    others: Sequence[Mapping[str, Any]], state: Mapping[str, Any], claim: Claim, ids: Sequence[str], declared: int
) -> int:
    """The number of this opening among all looks at these prompts; refuses one more than declared.

    An audit that asked what is claimed now, or what another opening asked, is no further look where it shows the whole
    test (`SHOWN`): after an audit, categories, a pool or a strength can still be chosen. The same claim on a larger or
    smaller set is one: to add prompts until a claim passes is to look again.
    """
    mine = _marks(state, ids)
    touching = {key for key, known in state["splits"].items() if mine & _marks(state, known)}
    openings = [entry for entry in others if entry["split"] in touching]
    asked = {claim.look, *(entry["look"] for entry in openings if entry["kind"] in SHOWN)}
    audits = {look["look"] for look in state["looks"] if look["split"] in touching}
    audits -= asked if claim.kind in SHOWN else set()
    used = len(openings) + len(audits)
    allowed = min([declared, *(entry["declared"] for entry in openings)])
    if used + 1 > allowed:
        raise InfeasibleError(
            f"these {len(ids)} prompts, or some of them, were looked at {_counted(used, 'time')} before "
            f"(certificates: {len(openings)}, audits that count: {len(audits)}), and the number of openings declared "
            f"is {allowed}: an undeclared opening never certifies",
            remedy="use fresh prompts; next time declare the openings beforehand (--openings m, safety.openings: m)",
        )
    return used + 1


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
