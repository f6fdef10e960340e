"""A classification task: one instruction, one text, one of a few label words as the reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.data.catalogue import load
from holdfast.data.examples import Example, make_example
from holdfast.data.templates import Template
from holdfast.tasks.label_match import grade_label
from holdfast.tasks.task import MAX_NEW_TOKENS, Grade, Match, user_text


@dataclass(frozen=True)
class LabelTask:
    """Rows (text, label number) of a collection as instruction, text and label word.

    Attributes:
        name: of the task and of its collection in `data/catalogue.py`.
        summary: one line for people.
        instruction: put before every text.
        column: the text's column.
        held_out: the split that replies are graded on.
        spellings: label words in the order of the label numbers, each with the lower-case words that name it.
        metric: the headline match.
        max_new_tokens: length of the longest reply.
    """

    name: str
    summary: str
    instruction: str
    column: str
    held_out: str
    spellings: Mapping[str, tuple[str, ...]]
    metric: Match = "lenient"
    max_new_tokens: int = MAX_NEW_TOKENS

    def train(self, template: Template, *, folder: Path | None = None) -> list[Example]:
        """The training split."""
        return self._examples("train", template, folder)

    def test(self, template: Template, *, folder: Path | None = None) -> list[Example]:
        """The held-out split."""
        return self._examples(self.held_out, template, folder)

    def grade(self, reply: str, target: str) -> Grade:
        """By the labels that the reply names."""
        return grade_label(reply, target, self.spellings)

    def _examples(self, split: str, template: Template, folder: Path | None) -> list[Example]:
        labels = list(self.spellings)
        rows = load(self.name, split, folder=folder).rows
        return [
            make_example(
                user_text(self.instruction, row[self.column], template),
                labels[row["label"]],
                f"row {number} of {self.name} {split}",
            )
            for number, row in enumerate(rows, start=1)
        ]
