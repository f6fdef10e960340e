"""The content of a ledger of openings: its file, which prompts it recognises, how often they were looked at.

The file holds ids and hashes, never text:

| key        | content                                                                                            |
|------------|----------------------------------------------------------------------------------------------------|
| `splits`   | sets of ids, each by the hash of its sorted ids; openings, looks and closed shares name them       |
| `openings` | claims that were opened: number, number declared, claim, look, kind, and a label                   |
| `looks`    | audits                                                                                             |
| `closed`   | certify shares of runs: run folder, safety set, openings declared                                  |
| `texts`    | by id, a hash of the prompt's normalised text                                                      |
| `sketches` | by id, hashes of some of its shingles                                                              |

Version 1 had neither `closed` nor `sketches`. It is read; its prompts are recognised by id and text alone.

Prompts that were seen before, nearly, are recognised without their text. A prompt's mark (`data/shingles.py`) holds a
hash of its text and those of all its word 3-shingles. Of a prompt that was opened the smallest 32 are kept, its sketch:
a sample of its shingles, and all of them up to 34 words. With S the sketch, N the hashes of a prompt now, and N' those
of N up to the largest of S (N itself, where S is all),

    |S and N| / |S| >= 4/5   the prompt of before is inside the one of now, or
    |S and N'| / |N'| >= 4/5 the one of now is inside the one of before (N' of three hashes or more, or N itself):

then it is no fresh prompt. A prompt of now inside one that is many times longer can be missed: N' is then too small.
"""

import base64
import binascii
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.core.errors import CheckpointError, ConfigError, InfeasibleError
from holdfast.core.files import read_json, unwritable
from holdfast.core.hashing import sha256_json, sha256_lines

logger = logging.getLogger(__name__)

VERSION = 2
ENDING = ".openings.json"
# Kinds whose test an audit shows in full. A sequence is here since it refuses prompts that were audited before it.
SHOWN = ("fixed", "sequential")
State = Mapping[str, Any]
Texts = Mapping[str, str]
LOOKED = ("template", "tokenizer", "max_length")  # settings that change the figures of an audit
JUDGE = "judge"  # name, revision and longest reply, where replies were judged
KEPT = 32
NUMERATOR, DENOMINATOR = 4, 5
LEAST = 3

Hashes = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Claim:
    """What an opening asks: is it true that at most a share alpha of the prompts degrades by more than tau?

    Degradations of the model `after` are measured against `before`; `settings` is what else decides them or the test.
    """

    before_sha256: str
    after_sha256: str
    unit: str
    tau: float
    alpha: float
    first_k: int
    confidence: float
    kind: str
    settings: Mapping[str, Any]

    @property
    def sha256(self) -> str:
        return sha256_json({**asdict(self), "settings": dict(self.settings)})

    @property
    def look(self) -> str:
        """What an audit has in common with a certificate: all but confidence, kind and some settings."""
        names = ("before_sha256", "after_sha256", "unit", "tau", "alpha", "first_k", "settings")
        return look_sha256(*(getattr(self, name) for name in names))


def look_sha256(
    before_sha256: str, after_sha256: str, unit: str, tau: float, alpha: float, first_k: int,
    settings: Mapping[str, object],
) -> str:  # fmt: skip
    """Identity of a look at prompts: which two models were compared, and by which measure.

    Of `settings`, as a claim has them, those that a better figure could be looked for with: `LOOKED` and the judge.
    """
    read = [settings.get(name) for name in LOOKED]
    read += [settings[JUDGE]] if settings.get(JUDGE) else []
    return sha256_json([before_sha256, after_sha256, unit, float(tau), float(alpha), first_k, *read])


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
    """The content of a ledger in this version's layout; an empty one where there is none."""
    empty: dict[str, Any] = {"version": VERSION, "splits": {}, "texts": {}, "sketches": {}}
    empty |= {"openings": [], "looks": [], "closed": []}
    if not path.exists():
        return empty
    state = read_json(path)
    if isinstance(state, dict) and state.get("version") == 1:
        logger.info("%s is a ledger of version 1: prompts entered so far are recognised by id and text alone", path)
        state = empty | state | {"version": VERSION}
    if not isinstance(state, dict) or state.get("version") != VERSION or not _sound(state):
        remedy = "restore it from a backup: without it nobody knows how often the prompts were opened"
        raise CheckpointError(f"{path} is not a ledger of openings, version {VERSION}, or is damaged", remedy=remedy)
    return state


def _sound(state: Mapping[str, Any]) -> bool:
    """Whether all parts are there and every set of ids has the hash it is filed under."""
    try:
        named = [entry["split"] for key in ("openings", "looks", "closed") for entry in state[key]]
        numbers = [entry[key] for entry in state["openings"] for key in ("declared", "number")]
        numbers += [entry["declared"] for entry in state["closed"]]
        keys = {"openings": ("claim", "look", "kind"), "looks": ("look",), "closed": ("run", "set")}
        texts = [entry[key] for kind, names in keys.items() for entry in state[kind] for key in names]
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


def note_marks(state: dict[str, Any], texts: Texts) -> None:
    for name, text in texts.items():
        mark = read_mark(text)
        state["texts"][name] = mark.text
        # The first sketch of a prompt stays: which shingles are common depends on the set it is opened in.
        if len(mark.hashes) and name not in state["sketches"]:
            state["sketches"][name] = sketch(mark.hashes)


def shared_prompts(state: State, ids: Sequence[str], texts: Texts, known: Iterable[str]) -> set[str]:
    """Those of the prompts `ids` that are among the `known` ones: by id, by a hash of the text, or nearly."""

    def marks(name: str, texts: Texts) -> set[str]:
        text = texts[name].partition(" ")[0] if name in texts else state["texts"].get(name)
        return {name} if text is None else {name, text}

    theirs = {mark for name in known for mark in marks(name, {})}
    names = {name for name in ids if not theirs.isdisjoint(marks(name, texts))}
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
            f"these {len(ids)} prompts, or some of them, were looked at {used} time{'s' * (used != 1)} before "
            f"(certificates: {len(openings)}, audits that count: {len(audits)}), and the number of openings declared "
            f"is {allowed}: an undeclared opening never certifies",
            remedy="use fresh prompts; next time declare the openings beforehand (--openings m, safety.openings: m)",
        )
    return used + 1


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


class Mark(NamedTuple):
    """A mark, read: the hash of the text, and the hashes of its shingles, ascending."""

    text: str
    hashes: Hashes


def read_mark(mark: str) -> Mark:
    """Split a mark; one without shingles has none."""
    text, _, coded = mark.partition(" ")
    return Mark(text, decoded(coded))


def decoded(coded: str) -> Hashes:
    try:
        return np.frombuffer(base64.b64decode(coded, validate=True), dtype="<u8").astype(np.uint64)
    except binascii.Error as error:
        raise ValueError("not hashes of shingles") from error


def sketch(hashes: Hashes) -> str:
    """The smallest hashes, as text."""
    return base64.b64encode(hashes[:KEPT].astype("<u8").tobytes()).decode("ascii")


def seen(now: Mapping[str, Hashes], before: Mapping[str, str]) -> set[str]:
    """Names of the prompts of now that are nearly one of those with these sketches."""
    names = [name for name, hashes in now.items() if len(hashes)]
    if not names:
        return set()
    every = np.concatenate([now[name] for name in names])
    order = np.argsort(every, kind="stable")
    index, owner = every[order], np.repeat(np.arange(len(names)), [len(now[name]) for name in names])[order]
    found: set[int] = set()
    for old in (decoded(coded) for coded in before.values() if coded):
        places = zip(np.searchsorted(index, old), np.searchsorted(index, old, side="right"), strict=True)
        mine, shared = np.unique(np.concatenate([owner[low:high] for low, high in places]), return_counts=True)
        pairs = zip(mine.tolist(), shared.tolist(), strict=True)
        fresh = {new for new, both in pairs if new not in found and _near(old, now[names[new]], both)}
        found |= fresh
        if 100 * len(fresh) > len(names):  # variants of one template: every other one would meet them all again
            rest = ~np.isin(owner, list(fresh))
            index, owner = index[rest], owner[rest]
    return {names[place] for place in found}


def _near(old: Hashes, new: Hashes, both: int) -> bool:
    """Whether a prompt of now is near the sketch that it shares `both` hashes with."""
    if DENOMINATOR * both >= NUMERATOR * len(old):
        return True
    some = len(new) if len(old) < KEPT else int(np.searchsorted(new, old[-1], side="right"))
    return DENOMINATOR * both >= NUMERATOR * some and some >= min(LEAST, len(new))
