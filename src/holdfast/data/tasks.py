"""A downstream task: what is trained on, what is held out, and when a reply is right.

Every task has two matches. `lenient` is the one of the literature, which over-credits verbose replies; `strict`
credits only a reply that commits itself. `metric` says which of them a paper's table shows.

Beside tasks, data sets with roles that a run file names instead of files (`task: {role: align}`): a protocol decides
which public examples align a model, steer, watch, certify, poison and are trained against.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from holdfast.core.registry import Registry
from holdfast.data.examples import Example
from holdfast.data.templates import INPUT_MARK, Template, known_template

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
    """The prompt of a task row: the instruction with the input below it, under a mark in the alpaca format.

    Without a template nothing separates prompt and completion, so the prompt itself ends with an empty line: otherwise
    the target would be glued to the last word of the input.
    """
    mark = INPUT_MARK if known_template(template) == "alpaca" else "\n\n"
    text = instruction + mark + input_text if input_text else instruction
    return f"{text}\n\n" if template == "none" else text


PAPER = "paper"


class Roles(Protocol):
    """Who sees which examples; no two of the held-out roles share a prompt."""

    @property
    def align(self) -> Sequence[Example]: ...
    @property
    def constraint(self) -> Sequence[Example]: ...
    @property
    def monitor(self) -> Sequence[Example]: ...
    @property
    def certify(self) -> Sequence[Example]: ...
    @property
    def poison(self) -> Sequence[Example]: ...
    @property
    def harmful(self) -> Sequence[Example]: ...


# Draws every role by the settings of the protocol: `protocol:` of a run file.
DrawRoles = Callable[[Mapping[str, Any]], Roles]
PROTOCOLS: Registry[DrawRoles] = Registry("protocol")
