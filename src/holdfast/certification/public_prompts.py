"""Openings of prompts that everybody has: they are counted for one model before and one task.

Prompts that ship with holdfast are public, and every run certifies on the same ones. In one count for all, the first
certificate anywhere would use them up. So they are entered under names of their own for the content of the model before
and of the task: a second run on both shares their openings, whatever its folder is called and wherever the task file
lies; a run on another model or task does not. Every other prompt of the same certificate is entered as itself, and is
recognised in whatever else is certified with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from holdfast.certification.claim import Claim
from holdfast.certification.ledger_file import split_sha256
from holdfast.certification.look_count import Used
from holdfast.certification.openings import Closed, Ledger, Opening
from holdfast.core.hashing import sha256_json, sha256_text

DIGITS = 16


def scope_of(before_sha256: str, task_sha256: str) -> str:
    """The name of one model before and one task, both by content."""
    return sha256_json([before_sha256, task_sha256])[:DIGITS]


class ScopedLedger(Ledger):
    """A ledger in which some prompts count within one scope only.

    A scoped prompt is entered as `ID@SCOPE`, and recognised there by its id and its whole text. Callers see ids as they
    gave them.

    Args:
        path: of the file, shared with all other prompts.
        scope: from `scope_of`.
        public: ids of the prompts that count within it.
    """

    def __init__(self, path: Path, scope: str, public: frozenset[str]) -> None:
        super().__init__(path)
        self.scope, self.public = scope, public

    def check(
        self,
        claim: Claim,
        ids: Sequence[str],
        *,
        declared: int | None = None,
        sequential: bool = False,
        texts: Mapping[str, str] | None = None,
    ) -> Opening:
        """As of `Ledger`."""
        found = super().check(
            claim, self._names(ids), declared=declared, sequential=sequential, texts=self._marks(texts)
        )
        return replace(found, split_sha256=split_sha256(ids))

    def open(
        self,
        claim: Claim,
        ids: Sequence[str],
        *,
        declared: int | None = None,
        sequential: bool = False,
        texts: Mapping[str, str] | None = None,
        label: str | None = None,
    ) -> Opening:
        """As of `Ledger`."""
        found = super().open(
            claim, self._names(ids), declared=declared, sequential=sequential, texts=self._marks(texts), label=label
        )
        return replace(found, split_sha256=split_sha256(ids))

    def record_look(self, look: str, ids: Sequence[str], *, texts: Mapping[str, str] | None = None) -> None:
        """As of `Ledger`."""
        super().record_look(look, self._names(ids), texts=self._marks(texts))

    def close(
        self, run: str, name: str, ids: Sequence[str], *, declared: int, texts: Mapping[str, str] | None = None
    ) -> None:
        """As of `Ledger`."""
        super().close(run, name, self._names(ids), declared=declared, texts=self._marks(texts))

    def closed(self, ids: Sequence[str], *, texts: Mapping[str, str] | None = None) -> list[Closed]:
        """As of `Ledger`."""
        given = {self._name(name): name for name in ids}
        found = super().closed(list(given), texts=self._marks(texts))
        return [replace(one, ids=tuple(sorted(given[name] for name in one.ids))) for one in found]

    def used(self, ids: Sequence[str], texts: Mapping[str, str] | None = None) -> Used:
        """As of `Ledger`."""
        return super().used(self._names(ids), self._marks(texts))

    def settle(self, claim: str, ids: Sequence[str], outcome: Sequence[str], *, first_stands: bool = True) -> None:
        """As of `Ledger`."""
        super().settle(claim, self._names(ids), outcome, first_stands=first_stands)

    def came_to(self, claim: str, ids: Sequence[str], outcome: Sequence[str]) -> bool:
        """As of `Ledger`."""
        return super().came_to(claim, self._names(ids), outcome)

    def find(self, claim: str, ids: Sequence[str]) -> Opening | None:
        """As of `Ledger`."""
        found = super().find(claim, self._names(ids))
        return None if found is None else replace(found, split_sha256=split_sha256(ids))

    def _name(self, name: str) -> str:
        return f"{name}@{self.scope}" if name in self.public else name

    def _names(self, ids: Sequence[str]) -> list[str]:
        return [self._name(name) for name in ids]

    def _marks(self, texts: Mapping[str, str] | None) -> dict[str, str]:
        """Of a scoped prompt the hash of its text and scope: nothing that another scope would recognise it by."""
        found = {}
        for name, mark in (texts or {}).items():
            text = mark.partition(" ")[0]
            found[self._name(name)] = (
                f"text:{sha256_text(f'{self.scope} {text}')[:DIGITS]}" if name in self.public else mark
            )
        return found
