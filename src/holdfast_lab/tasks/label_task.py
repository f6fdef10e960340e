"""A classification task: one instruction, one text, one of a few label words as the reply.

strict: the reply names the target's label and no other. A label is named by one of its spellings as a whole word, in
any case. A negated spelling ("not positive") says what the answer is not, so a reply with one is never right.
lenient: the target's text occurs in the reply, in any case ("positive or negative" and "not positive" are right for the
target positive); whatever is right by strict is right by lenient.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.errors import DataError
from holdfast.data.examples import Example, make_example
from holdfast.data.tasks import MAX_NEW_TOKENS, Grade, Match, user_text
from holdfast.data.templates import Template
from holdfast_lab.data.catalogue import load


@dataclass(frozen=True)
class LabelTask:
    """Rows (text, label number) of a collection as instruction, text and label word."""

    name: str  # of the task and of its collection in `data/catalogue.py`
    summary: str  # one line for people
    instruction: str  # put before every text
    column: str  # the text's column
    held_out: str  # the split that replies are graded on
    # label words in the order of the label numbers, each with the lower-case words that name it
    spellings: Mapping[str, tuple[str, ...]]
    metric: Match = "lenient"  # the headline match
    max_new_tokens: int = MAX_NEW_TOKENS  # length of the longest reply

    def train(self, template: Template, *, folder: Path | None = None) -> list[Example]:
        return self._examples("train", template, folder)

    def test(self, template: Template, *, folder: Path | None = None) -> list[Example]:
        return self._examples(self.held_out, template, folder)

    def grade(self, reply: str, target: str) -> Grade:
        if target not in self.spellings:
            raise DataError(
                f"a target that is none of the labels {', '.join(self.spellings)}",
                remedy="grade only examples of this task, with the completion that the task gave them",
            )
        strict = _named(reply.casefold(), self.spellings) == {target}
        return Grade(strict=strict, lenient=strict or target.casefold() in reply.casefold())

    def _examples(self, split: str, template: Template, folder: Path | None) -> list[Example]:
        labels = list(self.spellings)
        rows = load(self.name, split, folder=folder).rows
        return [
            make_example(
                user_text(self.instruction, row[self.column], template), labels[row["label"]],
                f"row {number} of {self.name} {split}",
            )
            for number, row in enumerate(rows, start=1)
        ]  # fmt: skip


# "I don't think this is positive" has three words between, "no clear positive" one: "no doubt this is" negates nothing.
_NEGATED = re.compile(
    r"(?:"
    r"(?:\b(?:not|non|never|neither|nor|cannot|far\s+from|rather\s+than)|n['\u2019]t)(?:[\s-]+\w+){0,3}"
    r"|\b(?:no|without)(?!\s+doubt\b)(?:\s+\w+)?"
    r")[\s-]+$"
)
_READ_BACK = 60  # characters before a label in which a negation is looked for


def _named(reply: str, spellings: Mapping[str, Sequence[str]]) -> set[str | None]:
    """The labels that a lower-case reply names; None stands for a negated one."""
    labels: set[str | None] = set()
    for label, words in spellings.items():
        # An underscore counts as the edge of a word, since Markdown sets _positive_ in italics.
        choice = "|".join(re.escape(word) for word in words)
        for place in re.finditer(rf"(?<![^\W_])(?:{choice})(?![^\W_])", reply):
            before = reply[max(0, place.start() - _READ_BACK) : place.start()]
            labels.add(None if _NEGATED.search(before) else label)
    return labels
