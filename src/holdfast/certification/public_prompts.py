"""Openings of prompts that everybody has: they are counted for one model before and one task.

Prompts that ship with holdfast are public, and every run certifies on the same ones. In one count for all, the first
certificate anywhere would use them up. So they are entered under names of their own for the content of the model before
and of the task: a second run on both shares their openings, whatever its folder is called and wherever the task file
lies; a run on another model or task does not. Every other prompt of the same certificate is entered as itself, and is
recognised in whatever else is certified with it.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.certification.openings import Ledger, Texts
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

    def _name(self, prompt: str) -> str:
        return f"{prompt}@{self.scope}" if prompt in self.public else prompt

    def _marks(self, texts: Texts) -> dict[str, str]:
        """Of a scoped prompt the hash of its text and scope: nothing that another scope would recognise it by."""
        marks = {}
        for prompt, mark in (texts or {}).items():
            text = mark.partition(" ")[0]
            scoped = f"text:{sha256_text(f'{self.scope} {text}')[:DIGITS]}"
            marks[self._name(prompt)] = scoped if prompt in self.public else mark
        return marks
