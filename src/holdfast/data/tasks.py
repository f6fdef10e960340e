"""A downstream task: what is trained on, what is held out, and when a reply is right.

Every task has two matches. `lenient` is the one of the literature, which over-credits verbose replies; `strict`
credits only a reply that commits itself. `metric` says which of them a paper's table shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from holdfast.core.registry import Registry
from holdfast.data.examples import Example
from holdfast.data.templates import Template, join

Match = Literal["lenient", "strict"]
MAX_NEW_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Grade:
    """Whether a reply is right, by either match; strict implies lenient."""

    strict: bool
    lenient: bool


@runtime_checkable
class Task(Protocol):
    """Examples of a task and the grading of replies to them."""

    @property
    def name(self) -> str: ...  # as run files and result files spell it
    @property
    def summary(self) -> str: ...  # one line for `holdfast ls tasks`
    @property
    def metric(self) -> Match: ...  # the match of the headline figure
    @property
    def max_new_tokens(self) -> int: ...  # length of the longest reply

    def train(self, template: Template, *, folder: Path | None = None) -> list[Example]:
        """The training split, in its own order: plain prompts, completion = target."""

    def test(self, template: Template, *, folder: Path | None = None) -> list[Example]:
        """The held-out split, in its own order and the same form."""

    def grade(self, reply: str, target: str) -> Grade:
        """Compare a reply with the completion of its example."""


TASKS: Registry[Task] = Registry("task")


def user_text(instruction: str, input_text: str, template: Template) -> str:
    """The prompt of a task row: instruction and input joined as `template` wants it.

    Without a template nothing separates prompt and completion, so the prompt itself ends with an empty line: otherwise
    the target would be glued to the last word of the input.
    """
    text = join(instruction, input_text, template)
    return f"{text}\n\n" if template == "none" else text
