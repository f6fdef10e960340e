"""Which prompts a ledger knows: by id, by a hash of the text, or nearly, by hashes of shingles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.certification.sketches import read_mark, seen, sketch


def note_marks(state: dict[str, Any], texts: Mapping[str, str]) -> bool:
    """Put the marks of prompts into `state`; whether anything there has changed."""
    marks = {name: read_mark(mark) for name, mark in texts.items()}
    known = {name: mark.text for name, mark in marks.items()}
    sketches = {name: sketch(mark.hashes) for name, mark in marks.items() if len(mark.hashes)}
    # The first sketch of a prompt stays: which shingles are common depends on the set it is opened in.
    new = {name: coded for name, coded in sketches.items() if name not in state["sketches"]}
    changed = bool(new) or not known.items() <= state["texts"].items()
    state["texts"] |= known
    state["sketches"] |= new
    return changed


def _marks(state: Mapping[str, Any], ids: Iterable[str], texts: Mapping[str, str] | None = None) -> dict[str, str]:
    """By what prompts are recognised, their ids and, where known, the hashes of their texts; to the id."""
    own = {name: mark.partition(" ")[0] for name, mark in (texts or {}).items()}
    found = {}
    for name in ids:
        found[name] = name
        if (text := own.get(name, state["texts"].get(name))) is not None:
            found[text] = name
    return found


def shared_prompts(
    state: Mapping[str, Any], ids: Sequence[str], texts: Mapping[str, str], known: Iterable[str]
) -> set[str]:
    """Those of the prompts `ids` that are among the `known` ones: by id, by text, or nearly."""
    mine, theirs = _marks(state, ids, texts), _marks(state, known)
    names = {name for mark, name in mine.items() if mark in theirs}
    now = {name: read_mark(texts[name]).hashes for name in ids if name in texts and name not in names}
    before = {name: state["sketches"][name] for name in known if name in state["sketches"]}
    return names | seen(now, before)


def touching(state: Mapping[str, Any], ids: Sequence[str], texts: Mapping[str, str]) -> set[str]:
    """Keys of the sets that share a prompt with these."""
    looked = {entry["split"] for key in ("openings", "looks") for entry in state[key]}
    return {key for key in looked if shared_prompts(state, ids, texts, state["splits"][key])}
