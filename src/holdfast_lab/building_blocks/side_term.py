"""Defenses that add a gradient of their own to the task's, once per optimizer step, and what they have in common."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from holdfast.constraint.event import Event
from holdfast.constraint.gradients import Vector
from holdfast.constraint.memory import NONFINITE_LIMIT, NONFINITE_WINDOW
from holdfast.core.errors import NumericalError, UnsupportedError
from holdfast.core.ranks import rank
from holdfast.data.encode import Encoded
from holdfast.training.hooks import Defense, Row, TrainingRun
from holdfast.training.side_pass import RowLoss, token_mean_nll
from holdfast.training.steering import one_row
from holdfast.training.support import require_float32

logger = logging.getLogger(__name__)

LEFT_OUT: Row = {"event": str(Event.NONFINITE)}
SMALLEST_NORM = 1e-7


def refuse_where(cases: Sequence[tuple[object, str, str]]) -> None:
    """Raise for the first of the cases (found, what, remedy) that is found."""
    for found, what, remedy in cases:
        if found:
            raise UnsupportedError(what, remedy=remedy)


@dataclass
class NonfiniteWatch:
    """Counts the steps whose term was not finite and left out; more than 3 in 100 end the run."""

    name: str
    steps: list[int] = field(default_factory=list)

    def accepts(self, step: int, *numbers: float) -> bool:
        """Whether all numbers, those of all processes, are finite; if not, the step is counted."""
        if not (finite := all(map(math.isfinite, numbers))):
            self.left_out(step)
        return finite

    def left_out(self, step: int) -> None:
        """Count a step; raises when there are too many."""
        self.steps = [s for s in (*self.steps, step) if s > step - NONFINITE_WINDOW]
        if len(self.steps) > NONFINITE_LIMIT:
            raise NumericalError(
                f"{self.name}: a loss or gradient of its own was not finite in {len(self.steps)} of the last "
                f"{NONFINITE_WINDOW} steps; none of them was used",
                remedy="lower the learning rate, check the safe pairs for extreme examples, or train in float32",
            )
        if rank() == 0:
            logger.warning("%s: its term of step %d is not finite and was left out", self.name, step + 1)


class SideTermDefense(Defense):
    """Keeps the row of the step, and the count of steps whose term was not finite and left out."""

    def validate(self, run: TrainingRun) -> None:
        require_float32(run.model)

    def attach(self, run: TrainingRun) -> None:
        self._watch = NonfiniteWatch(self.name)
        self._row = {}

    def state_dict(self) -> dict[str, object]:
        return {"left_out": list(self._watch.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._watch.steps = [int(step) for step in state["left_out"]]


class SafeTermDefense(SideTermDefense):
    """Adds `weight` times a loss over this step's safe pairs; its config has the `weight`."""

    packs = True
    figure: ClassVar[str]  # what the loss, without its weight, is called in the row
    config: Any

    def loss(self, run: TrainingRun, rows: Sequence[Encoded]) -> RowLoss:
        raise NotImplementedError

    def on_gradient(self, run: TrainingRun) -> None:
        safe = run.data.safe
        rows = [safe[i] for i in run.data.draw(safe, self.name)]
        losses, gradient = run.engine.side_gradient(rows, self.loss(run, rows))
        value, weight, space = float(losses.sum()), self.config.weight, run.space()
        self._row = {self.figure: value}
        if not weight:  # a gradient of zeros would still move parameters that have none
            return
        if self._watch.accepts(run.progress.step, value, space.dots([(gradient, gradient)])[0]):
            space.add_to_gradient([gradient], [weight])
        else:
            self._row = {self.figure: None, **LEFT_OUT}


def harmful_batch(run: TrainingRun, size: int | None) -> list[int]:
    """Positions of this step's harmful pairs, of all processes; without `size` as many as task rows.

    Where a defense is validated, what cannot be shared among processes is refused before anything is measured.
    """
    return run.data.draw(run.data.harmful, "harmful", size or run.data.task_batch)


def row_of_sets(rows: Mapping[str, Row]) -> Row:
    """The step's row from one for every safety set, each with its event, the worst of which counts."""
    if not all(rows.values()):
        return {}
    events = [row["event"] for row in rows.values()]
    worst = next(event for event in (Event.NONFINITE, Event.CAPPED, Event.ACTIVE, Event.INACTIVE) if event in events)
    each = {name: {key: row[key] for key in row if key != "event"} for name, row in rows.items()}
    return one_row({"event": str(worst)}, each)


@contextmanager
def harmful_step(run: TrainingRun, rows: list[Encoded], radius: float) -> Iterator[tuple[float, Vector]]:
    """L_harm and its gradient g at theta; inside, the model is at `theta - radius g / (norm(g) + 1e-7)`."""
    space = run.space()
    losses, here = run.engine.side_gradient(rows, token_mean_nll(rows))
    norm = space.dots([(here, here)])[0] ** 0.5
    with space.moved(here, -radius / (norm + SMALLEST_NORM)):
        yield float(losses.sum()), here
