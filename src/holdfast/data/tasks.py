"""A downstream task: what is trained on, what is held out, and when a reply is right.

Every task has two matches: `lenient`, the one of the literature, over-credits verbose replies; `strict` credits only a
reply that commits itself. `metric` says which of them a paper's table shows.

Beside tasks, data sets with roles that a run file names instead of files (`task: {role: align}`): a protocol decides
which public examples align a model, steer, watch, certify, poison and are trained against.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from holdfast.core.errors import DataError
from holdfast.core.registry import Registry
from holdfast.core.seeding import generator
from holdfast.data.examples import Example, uniform
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


def poison_count(ratio: float, size: int) -> int:
    """floor(p N), with p the decimal that the user wrote: 0.29 of 100 is 29, though 0.29 * 100 < 29 in binary."""
    numerator, denominator = Decimal(str(ratio)).as_integer_ratio()
    return numerator * size // denominator


def poisoned(
    task: Sequence[Example], poison: Sequence[Example], *, size: int, ratio: float, seed: int
) -> list[Example]:
    """floor(p N) unsafe and N - floor(p N) task examples, shuffled; N is `size`, p is `ratio`.

    Which ones are taken depends on their ids and the seed, not on their order; for one seed the unsafe examples of a
    smaller ratio are among those of a larger one, and the task examples of a larger among those of a smaller. Examples
    with equal id count once, so that N examples are N different ones and a trainer that drops repeated rows drops none.
    """
    unsafe = poison_count(ratio, size)
    if shared := {example.id for example in task} & {example.id for example in poison}:
        what = f"{len(shared)} examples are task and poison data at once: {', '.join(sorted(shared)[:20])}"
        raise DataError(what, remedy="remove them from the task data: their share could not be counted")
    chosen = [*_first(poison, unsafe, seed, "poison"), *_first(task, size - unsafe, seed, "task")]
    order = generator(seed, "mixture").permutation(len(chosen))
    return uniform(chosen[place] for place in order)


def _first(examples: Sequence[Example], n: int, seed: int, name: str) -> list[Example]:
    distinct = {example.id: example for example in reversed(examples)}
    if len(ids := sorted(distinct)) < n:
        remedy = f"give more {name} examples (of poison: roles.poison), or ask for a smaller set (size)"
        raise DataError(
            f"the poisoned set needs {n} {name} examples; there are {len(ids)} different ones", remedy=remedy
        )
    order = generator(seed, name).permutation(len(ids))
    return [distinct[ids[place]] for place in order[:n]]
