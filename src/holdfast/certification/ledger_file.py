"""The file of a ledger of openings: where it lies, reading it, and what it must hold to be believed.

It holds ids and hashes, never text:

| key        | content                                                                                            |
|------------|----------------------------------------------------------------------------------------------------|
| `splits`   | sets of ids, each by the hash of its sorted ids; openings, looks and closed shares name them       |
| `openings` | claims that were opened: number, number declared, claim, look, kind, and a label                   |
| `looks`    | audits                                                                                             |
| `closed`   | certify shares of runs: run folder, safety set, openings declared                                  |
| `texts`    | by id, a hash of the prompt's normalised text                                                      |
| `sketches` | by id, hashes of some of its shingles (`sketches.py`)                                              |

Version 1 had neither `closed` nor `sketches`. It is read; its prompts are recognised by id and text alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.certification.sketches import decoded
from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.core.files import read_json, unwritable
from holdfast.core.hashing import sha256_lines

logger = logging.getLogger(__name__)

VERSION = 2
ENDING = ".openings.json"


def split_sha256(ids: Sequence[str]) -> str:
    """sha256 of the sorted ids, as in a run's splits.json."""
    return sha256_lines(sorted(ids))


def default_ledger(source: str) -> Path:
    """Where the openings of a safety source are written: beside a local file, else in holdfast's cache.

    The cache holds one ledger for all data, so that a set shared by two sources is still seen. It is also that of
    files in the cache: two draws of the protocol's roles are two files with many prompts in common. The place never
    depends on what may be written: `require_writable_ledger` refuses instead. A copy of the file elsewhere has a ledger
    of its own, which nothing can prevent.
    """
    path = Path(source).expanduser()
    root = Path(os.environ.get("HOLDFAST_CACHE") or Path.home() / ".cache" / "holdfast").expanduser()
    if path.is_file() and root.resolve() not in path.resolve().parents:
        path = path.resolve()
        return path.with_name(path.name + ENDING)
    return root / "openings" / f"ledger{ENDING}"


def require_writable_ledger(path: Path) -> None:
    """Refuse a ledger in which no opening can be entered, before anything is measured."""
    if (there := unwritable(path.parent)) is not None:
        raise ConfigError(
            f"the ledger of openings {path} cannot be written: {there} is "
            f"{'read-only' if there.is_dir() else 'no folder'}, and an opening that is not entered certifies nothing",
            remedy="make the folder writable, or name one ledger for all openings of these prompts with --ledger",
        )


def read_ledger(path: Path) -> dict[str, Any]:
    """The content of a ledger in this version's layout; an empty one where there is none.

    Raises:
        CheckpointError: it is no ledger, or damaged.
    """
    empty: dict[str, Any] = {"version": VERSION, "splits": {}, "openings": [], "looks": [], "closed": []}
    empty |= {"texts": {}, "sketches": {}}
    if not path.exists():
        return empty
    state = read_json(path)
    if isinstance(state, dict) and state.get("version") == 1:
        logger.info("%s is a ledger of version 1: prompts entered so far are recognised by id and text alone", path)
        state = empty | state | {"version": VERSION}
    if not isinstance(state, dict) or state.get("version") != VERSION or not _sound(state):
        raise CheckpointError(
            f"{path} is not a ledger of openings, version {VERSION}, or is damaged",
            remedy="restore it from a backup: without it nobody knows how often the prompts were opened",
        )
    return state


def _sound(state: Mapping[str, Any]) -> bool:
    """Whether all parts are there and every set of ids has the hash it is filed under."""
    try:
        named = [entry["split"] for key in ("openings", "looks", "closed") for entry in state[key]]
        numbers = [entry[key] for entry in state["openings"] for key in ("declared", "number")]
        numbers += [entry["declared"] for entry in state["closed"]]
        texts = [entry[key] for entry in state["openings"] for key in ("claim", "look", "kind")]
        texts += [look["look"] for look in state["looks"]]
        texts += [entry[key] for entry in state["closed"] for key in ("run", "set")]
        texts += [text for key in ("texts", "sketches") for pair in state[key].items() for text in pair]
        for coded in state["sketches"].values():
            decoded(coded)
        return (
            all(split_sha256(ids) == key for key, ids in state["splits"].items())
            and set(named) <= set(state["splits"])
            and all(isinstance(number, int) and number >= 1 for number in numbers)
            and all(isinstance(text, str) for text in texts)
            and all(isinstance(entry.get("label"), str | None) for entry in state["openings"])
        )
    except (KeyError, TypeError, AttributeError, ValueError):
        return False
