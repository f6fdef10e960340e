"""Side terms that are not finite: left out of their step by name, and the end of the run when there are many."""

from __future__ import annotations

import logging
import math
from typing import Any

from holdfast.constraint.memory import NONFINITE_LIMIT, NONFINITE_WINDOW
from holdfast.core.errors import NumericalError
from holdfast.core.ranks import rank

logger = logging.getLogger(__name__)


class NonfiniteWatch:
    """Steps of which a defense's own term was left out; more than 3 within 100 steps raise `NumericalError`.

    Args:
        name: the defense, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps: list[int] = []

    def accepts(self, step: int, *numbers: float) -> bool:
        """Whether the term may be used: its value and the squared norm of its gradient are finite.

        Numbers must be those of all processes, so that all decide alike.
        """
        if all(map(math.isfinite, numbers)):
            return True
        self.left_out(step)
        return False

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

    def state_dict(self) -> dict[str, Any]:
        """The steps."""
        return {"left_out": list(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.steps = [int(step) for step in state["left_out"]]
