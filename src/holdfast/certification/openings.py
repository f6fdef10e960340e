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

A prompt is shared when its id or its normalised text is, or nearly (`ledger_state.py`): another completion, case,
spacing or introduction makes no fresh prompt. The certify share of a run is entered as closed when the run begins
(`close`), so that an audit of the whole data file can be refused before it spends the share.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.certification import ledger_state
from holdfast.certification.ledger_state import Claim, Used, default_ledger, read_ledger, shared_prompts, split_sha256
from holdfast.core.errors import CheckpointError, ConfigError, DataError, InfeasibleError
from holdfast.core.file_lock import locked
from holdfast.core.files import json_text, write_text
from holdfast.core.hashing import sha256_json, sha256_lines, sha256_text

__all__ = ["Closed", "Ledger", "Opening", "ScopedLedger", "Used", "default_ledger", "scope_of", "split_sha256"]

Texts = Mapping[str, str] | None
"""By id, the prompt's mark (`data/shingles.py`): a hash of its text, and hashes of its shingles."""


@dataclass(frozen=True, slots=True)
class Opening:
    """One entry of the ledger: number `number` of `declared`."""

    declared: int
    number: int
    claim: str
    split_sha256: str


@dataclass(frozen=True, slots=True)
class Closed:
    """Prompts that are closed for the certification of a run: the ids of those asked about, and openings declared."""

    run: str
    ids: tuple[str, ...]
    declared: int


class Ledger:
    """The openings written in one file, which is made at the first entry."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _names(self, ids: Sequence[str]) -> list[str]:
        return list(ids)

    def _marks(self, texts: Texts) -> dict[str, str]:
        """The marks that prompts are entered with, by the ids they are entered under."""
        return dict(texts or {})

    @contextmanager
    def _changed(self) -> Iterator[dict[str, Any]]:
        """The content, written back where it was changed and nothing was raised."""
        with locked(self.path):
            state = read_ledger(self.path)
            before = json_text(state)
            yield state
            if (after := json_text(state)) != before or not self.path.exists():
                write_text(self.path, after)

    def check(
        self, claim: Claim, ids: Sequence[str], *, declared: int | None = None, sequential: bool = False,
        texts: Texts = None,
    ) -> Opening:  # fmt: skip
        """What `open` would return or refuse, with nothing written."""
        ledger_state.require_writable_ledger(self.path)
        entry = _enter(read_ledger(self.path), claim, self._names(ids), declared, sequential, self._marks(texts))
        return _opening(entry, ids)

    def open(
        self, claim: Claim, ids: Sequence[str], *, declared: int | None = None, sequential: bool = False,
        texts: Texts = None, label: str | None = None,
    ) -> Opening:  # fmt: skip
        """Enter an opening, unless this very one is there already.

        Args:
            ids: of the prompts; for `sequential` in the order in which they arrived.
            declared: how often these prompts may be opened; None takes what was declared, or 1.
            sequential: the prompts may grow at the end without a new opening.
            label: whose opening it is, for people: the run's or output's folder.
        """
        ledger_state.require_writable_ledger(self.path)
        with self._changed() as state:
            entry = _enter(state, claim, self._names(ids), declared, sequential, self._marks(texts), label)
        return _opening(entry, ids)

    def record_look(self, look: str, ids: Sequence[str], *, texts: Texts = None) -> None:
        """Enter an audit of these prompts (`look_sha256`): it counts when something else is certified on them."""
        ledger_state.require_writable_ledger(self.path)
        self._note("looks", {"look": look}, ids, texts)

    def close(self, run: str, name: str, ids: Sequence[str], *, declared: int, texts: Texts = None) -> None:
        """Enter the certify share of the safety set `name` of the run in a folder: closed until it is opened."""
        self._note("closed", {"run": run, "set": name, "declared": declared}, ids, texts)

    def _note(self, key: str, entry: dict[str, Any], ids: Sequence[str], texts: Texts) -> None:
        names = self._names(ids)
        _require_ids(names)
        entry |= {"split": split_sha256(names)}
        with self._changed() as state:
            ledger_state.note_marks(state, self._marks(texts))
            state["splits"].setdefault(entry["split"], sorted(names))
            if key == "closed":  # a run's set is closed once
                of = (entry["run"], entry["set"])
                state[key] = [one for one in state[key] if one == entry or (one["run"], one["set"]) != of]
            if entry not in state[key]:
                state[key].append(entry)

    def closed(self, ids: Sequence[str], *, texts: Texts = None) -> list[Closed]:
        """Which of these prompts are closed for the certification of a run: its folder is there, an opening is left."""
        state, marks = read_ledger(self.path), self._marks(texts)
        given = dict(zip(self._names(ids), ids, strict=True))
        shares = []
        for entry in state["closed"]:
            share = state["splits"][entry["split"]]
            if Path(entry["run"]).exists() and ledger_state.looks_used(state, share, {}).count < entry["declared"]:
                mine = sorted(given[name] for name in shared_prompts(state, list(given), marks, share))
                shares += [Closed(entry["run"], tuple(mine), entry["declared"])] if mine else []
        return shares

    def used(self, ids: Sequence[str], texts: Texts = None) -> Used:
        """How often these prompts, or some of them, were looked at; a further claim would be one look more."""
        return ledger_state.looks_used(read_ledger(self.path), self._names(ids), self._marks(texts))

    def settle(self, claim: str, ids: Sequence[str], outcome: Sequence[str], *, first_stands: bool = True) -> None:
        """Keep what an opening of a claim (its sha256) came to: one text a row, in the order of the rows.

        Where measuring again may come to something else, the first outcome stands: another one is refused, and later
        ones may only continue it, as a sequence grows.
        """
        with self._changed() as state:
            entry = _same(state, claim, split_sha256(self._names(ids)))
            if entry is None:
                raise CheckpointError(f"{self.path} holds no opening of this claim", remedy="certify again")
            rows, first = entry.get("outcome", [0, ""])
            changed = len(outcome) < rows or (rows > 0 and sha256_lines(outcome[:rows]) != first)
            if changed and first_stands:
                raise InfeasibleError(
                    f"the same question about these {len(ids)} prompts had another answer before: {self.path} holds "
                    "its hash, and to ask until an answer pleases certifies nothing",
                    remedy="use the first certificate; where it is lost, use fresh prompts",
                )
            entry["outcome"] = [len(outcome), sha256_lines(outcome)]

    def came_to(self, claim: str, ids: Sequence[str], outcome: Sequence[str]) -> bool:
        """Whether the opening of a claim came to this; of a sequence that grew since, only that it was opened."""
        entry = _same(read_ledger(self.path), claim, split_sha256(self._names(ids)))
        if entry is None:
            return self.find(claim, ids) is not None
        return bool(entry.get("outcome") == [len(outcome), sha256_lines(outcome)])

    def find(self, claim: str, ids: Sequence[str]) -> Opening | None:
        """The opening of a claim (its sha256) on these prompts; None when it was never entered.

        Of a sequence the prompts may be those at its start: a certificate stays true when the sequence grows.
        """
        names = self._names(ids)
        for entry in read_ledger(self.path)["openings"]:
            start = entry.get("sequence", [])[: len(ids)]
            if entry["claim"] == claim and (entry["split"] == split_sha256(names) or start == names):
                return _opening(entry, ids)
        return None


def _opening(entry: Mapping[str, Any], ids: Sequence[str]) -> Opening:
    return Opening(entry["declared"], entry["number"], entry["claim"], split_sha256(ids))


def _enter(
    state: dict[str, Any], claim: Claim, ids: Sequence[str], declared: int | None, sequential: bool,
    texts: Mapping[str, str], label: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Put the opening into `state`, or raise; an opening that is there stays as it is."""
    _require_ids(ids)
    ledger_state.note_marks(state, texts)
    if declared is not None and (isinstance(declared, bool) or not isinstance(declared, int) or declared < 1):
        raise ConfigError(f"openings is {declared!r}; expected a whole number >= 1", remedy="leave it out for 1")
    key = split_sha256(ids)
    entry = ledger_state.continued(state, claim, ids) if sequential else _same(state, claim.sha256, key)
    same = [other["declared"] for other in state["openings"] if other["split"] == key]
    stored = entry["declared"] if entry is not None else (same[0] if same else None)
    if declared is not None and stored not in (None, declared):
        raise ConfigError(
            f"these prompts declared {stored} opening{'s' * (stored != 1)} when they were first opened; now {declared}",
            remedy=f"leave --openings (safety.openings) at {stored}, which the first opening fixed; or use fresh "
            "prompts and declare the number before these are first opened",
        )
    if entry is None or entry["split"] != key:
        others = [other for other in state["openings"] if other is not entry]
        allowed = stored or declared or 1
        number = ledger_state.next_number(others, state, claim, ids, allowed, texts)
        if sequential:
            ledger_state.require_order_unseen(others, state, ids, [] if entry is None else entry["sequence"], texts)
        if entry is None:
            entry = {"declared": allowed, "number": number, "claim": claim.sha256, "look": claim.look}
            entry |= {"kind": claim.kind} | ({} if label is None else {"label": label})
            state["openings"].append(entry)
        entry["split"] = key
    if sequential:
        entry["sequence"] = list(ids)
    state["splits"][key] = sorted(ids)
    return entry


def _require_ids(ids: Sequence[str]) -> None:
    if not ids or len(set(ids)) != len(ids):
        what = f"{len(ids)} prompts with {len(set(ids))} different ids cannot be opened; expected different prompts"
        raise DataError(what, remedy="give at least one prompt, each once")


def _same(state: Mapping[str, Any], claim: str, split: str) -> dict[str, Any] | None:
    return next((entry for entry in state["openings"] if (entry["claim"], entry["split"]) == (claim, split)), None)


DIGITS = 16


def scope_of(before_sha256: str, task_sha256: str) -> str:
    """The name of one model before and one task, both by content."""
    return sha256_json([before_sha256, task_sha256])[:DIGITS]


class ScopedLedger(Ledger):
    """A ledger in which some prompts, given by their ids, count within one scope (`scope_of`) only.

    Prompts that ship with holdfast are public, and every run certifies on the same ones. In one count for all, the
    first certificate anywhere would use them up. So they are entered as `ID@SCOPE`, for the content of the model before
    and of the task, and recognised there by id and whole text: a second run on both shares their openings, whatever its
    folder is called and wherever the task file lies; a run on another model or task does not. Every other prompt of the
    same certificate is entered as itself. Callers see ids as they gave them.
    """

    def __init__(self, path: Path, scope: str, public: frozenset[str]) -> None:
        super().__init__(path)
        self.scope, self.public = scope, public

    def _names(self, ids: Sequence[str]) -> list[str]:
        return [f"{prompt}@{self.scope}" if prompt in self.public else prompt for prompt in ids]

    def _marks(self, texts: Texts) -> dict[str, str]:
        """Of a scoped prompt the hash of its text and scope: nothing that another scope would recognise it by."""

        marks = dict(texts or {})
        for prompt in self.public & set(marks):
            text = marks[prompt].partition(" ")[0]
            marks[prompt] = f"text:{sha256_text(f'{self.scope} {text}')[:DIGITS]}"
        return dict(zip(self._names(list(marks)), marks.values(), strict=True))
