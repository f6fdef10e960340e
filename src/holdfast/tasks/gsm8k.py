"""GSM8K: grade-school word problems, answered with a worked solution and a number.

The prompt is the question alone. The target is the gold solution with "####" written as "The final answer is:", one
space before the number (other code bases leave two there) and the calculator annotations `<<48/2=24>>` kept, as in the
literature.

lenient: the extracted final answer equals the target's; see `final_answer`. strict: likewise, and the reply states
it after the marker, so that the last number of a reply that was cut off or rambles cannot be right by luck.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.core.errors import DataError
from holdfast.data.catalogue import load
from holdfast.data.examples import Example, make_example
from holdfast.data.templates import Template
from holdfast.tasks.final_answer import MARKER, extract, extract_marked, same
from holdfast.tasks.task import MAX_NEW_TOKENS, TASKS, Grade, Match, user_text

_GOLD = "####"


@dataclass(frozen=True)
class Gsm8k:
    """Questions and worked solutions."""

    name: str = "gsm8k"
    summary: str = "grade-school word problems: the final number of a worked solution"
    metric: Match = "lenient"
    max_new_tokens: int = MAX_NEW_TOKENS

    def train(self, template: Template, *, folder: Path | None = None) -> list[Example]:
        """The training split."""
        return self._examples("train", template, folder)

    def test(self, template: Template, *, folder: Path | None = None) -> list[Example]:
        """The held-out split."""
        return self._examples("test", template, folder)

    def grade(self, reply: str, target: str) -> Grade:
        """By the final answer.

        Raises:
            DataError: the target has no marked number.
        """
        gold = extract_marked(target)
        if gold is None:
            raise DataError(
                f"gsm8k: a target without a number after {MARKER!r}",
                remedy="grade only examples of this task, with the completion that the task gave them",
            )
        return Grade(strict=same(extract_marked(reply), gold), lenient=same(extract(reply), gold))

    def _examples(self, split: str, template: Template, folder: Path | None) -> list[Example]:
        found = []
        for number, row in enumerate(load(self.name, split, folder=folder).rows, start=1):
            where = f"row {number} of {self.name} {split}"
            found.append(make_example(user_text(row["question"], "", template), _target(row["answer"], where), where))
        return found


def _target(answer: str, where: str) -> str:
    """The gold solution with its last line marked as the final answer."""
    solution, gold, last = answer.rpartition(_GOLD)
    target = f"{solution}{MARKER} {last.strip()}"
    if not gold or answer.count(_GOLD) > 1 or extract_marked(target) is None:
        raise DataError(
            f"{where}: a solution without exactly one {_GOLD!r} and a number after it",
            remedy="restore the row; every GSM8K solution ends in such a line",
        )
    return target


GSM8K = TASKS.register("gsm8k")(Gsm8k())
