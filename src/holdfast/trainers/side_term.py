"""Defenses that add a gradient of their own to the task's, once per optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from holdfast.constraint.barrier import Event
from holdfast.data.encode import Encoded
from holdfast.trainers.hooks import Defense, Row, TrainingRun
from holdfast.trainers.nonfinite import NonfiniteWatch
from holdfast.trainers.side_pass import RowLoss
from holdfast.trainers.support import require_float32

LEFT_OUT: Row = {"event": str(Event.NONFINITE)}


class SideTermDefense(Defense):
    """Keeps the row of the step, and the count of steps whose term was not finite and left out."""

    def validate(self, run: TrainingRun) -> None:
        """Trainable weights must be float32."""
        require_float32(run.model)

    def attach(self, run: TrainingRun) -> None:
        """No step without its term yet."""
        self._watch = NonfiniteWatch(self.name)
        self._row: Row = {}

    def row(self) -> Row:
        """The term's figures; None and an event where it was not finite."""
        return self._row

    def state_dict(self) -> dict[str, Any]:
        """Steps without their term."""
        return self._watch.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._watch.load_state_dict(state)


class SafeTermDefense(SideTermDefense):
    """Adds `weight` times a loss over this step's safe pairs; its config has the `weight`.

    Attributes:
        figure: what the loss, without its weight, is called in the row.
    """

    packs = True
    figure: ClassVar[str]
    config: Any

    def loss(self, run: TrainingRun, rows: Sequence[Encoded]) -> RowLoss:
        """The loss over these pairs, by rows."""
        raise NotImplementedError

    def on_gradient(self, run: TrainingRun) -> None:
        """Add the weighted gradient, if it is finite."""
        safe = run.safe
        rows = [safe[i] for i in run.draw(safe, self.name)]
        losses, gradient = run.side_gradient(rows, self.loss(run, rows))
        value, weight, space = float(losses.sum()), self.config.weight, run.space()
        self._row = {self.figure: value}
        if not weight:  # a gradient of zeros would still move parameters that have none
            return
        if self._watch.accepts(run.step, value, space.dots([(gradient, gradient)])[0]):
            space.add_to_gradient([gradient], [weight])
        else:
            self._row = {self.figure: None, **LEFT_OUT}
