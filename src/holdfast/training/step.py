"""One optimizer step: the task's gradient, and each constraint's beside it.

    accumulate   per micro-batch   adds the task's part to `.grad`; the fused engine passes over safety rows with it
    measure      once a step       D_i of every safety batch and the gradient of mean_i term(D)_i

Two calls and not one, since micro-batches arrive one by one, and a step that is discarded as a spike measures nothing.
Two engines: `TwoPassEngine`, the reference, passes over the safety rows when the task's gradient is complete;
`FusedEngine` (`fused_engine`) passes over both together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from holdfast.constraint.gradients import Vector
from holdfast.core.errors import UnsupportedError
from holdfast.core.ranks import rank
from holdfast.core.registry import Registry
from holdfast.data.encode import Encoded
from holdfast.training.hooks import Inputs, Items
from holdfast.training.side_pass import RowLoss, Term, safety_forward, safety_gradient, side_gradient

if TYPE_CHECKING:
    from holdfast.training.run import Run

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """One constraint at the current parameters."""

    index: Tensor  # positions of the global safety batch in the constraint split
    degradations: Tensor  # D_i of those rows, of all processes; float64 on the CPU
    gradient: Vector  # of `mean_i w_i term(D)_i`, reduced over the processes; w_i as the batch was drawn, else 1


StepMeasurement = dict[str, Measured]
"""Every constraint of a step, by the name of its safety set."""


class StepEngine(Protocol):
    """How gradients are computed."""

    fused: bool  # whether one pass gives the task's gradient and the constraints'

    @property
    def name(self) -> str: ...  # `two_pass`, `fused` or `fused, recorded`

    def accumulate(self, inputs: Inputs, items: Items, terms: Mapping[str, Term], *, skip: bool = False) -> Tensor:
        """Add one micro-batch's part of the task gradient to `.grad`; the detached loss.

        `terms` are of the constraints that this step will measure; `skip` looks at the safety rows first and leaves
        out those whose term is flat (the same step).
        """

    def measure(self, terms: Mapping[str, Term]) -> StepMeasurement:
        """Degradations and gradients of this step's safety batches, once its task gradient is complete."""

    def side_gradient(self, rows: Sequence[Encoded], loss: RowLoss) -> tuple[Tensor, Vector]:
        """Each row's loss (float64, on the CPU, of all processes) and the gradient of their sum, reduced over them."""

    def degradations(self, name: str) -> Tensor:
        """Differentiable D_i of this process's share of a safety batch (where `side_pass.may_share_backward`)."""


ENGINES: Registry[Callable[[Run], StepEngine | str]] = Registry("step engine")
"""What makes an engine for a run, or says why it cannot have it; of other packages by `holdfast.step_engines`."""


@ENGINES.register("two_pass")
class TwoPassEngine:
    """The task as TRL passes over it, then the safety rows by themselves."""

    name: str = "two_pass"
    fused: bool = False

    def __init__(self, run: Run) -> None:
        self._run = run

    def accumulate(self, inputs: Inputs, items: Items, terms: Mapping[str, Term], *, skip: bool = False) -> Tensor:
        return self._run.fitting.step()

    def measure(self, terms: Mapping[str, Term]) -> StepMeasurement:
        return {name: self._measure(name, term) for name, term in terms.items()}

    def _measure(self, name: str, term: Term) -> Measured:
        run, positions, weights = self._run, self._run.data.safety_batch(name), self._run.data.safety_weights(name)
        one = run.data.safety[name]
        degradations, gradient = run.fitting.side(
            run.side_rows,
            lambda most: safety_gradient(run.forward, one, positions, term, run.space(), most, weights),
        )
        return Measured(torch.tensor(positions), degradations, gradient)

    def side_gradient(self, rows: Sequence[Encoded], loss: RowLoss) -> tuple[Tensor, Vector]:
        run = self._run
        return run.fitting.side(run.side_rows, lambda most: side_gradient(run.forward, rows, loss, run.space(), most))

    def degradations(self, name: str) -> Tensor:
        return safety_forward(self._run.forward, self._run.data.safety[name], self._run.data.safety_batch(name))


@ENGINES.register("fused")
def _fused(run: Run) -> StepEngine | str:
    from holdfast.training.fused_engine import FusedEngine
    from holdfast.training.fused_setup import joint_pass

    joint = joint_pass(run)
    return joint if isinstance(joint, str) else FusedEngine(run, joint)


def choose_engine(run: Run) -> StepEngine:
    """The engine that `args.step` names: `auto` is fused on a GPU where nothing is against it."""
    wanted = run.args.step
    if wanted == "auto" and run.args.device.type != "cuda":
        return TwoPassEngine(run)
    made = ENGINES["fused" if wanted == "auto" else wanted](run)
    if not isinstance(made, str):
        return made
    if wanted != "auto":
        raise UnsupportedError(f"step: {wanted} is not possible: {made}", remedy="set step: auto or two_pass")
    run.step_declined = made
    if rank() == 0 and run.defense.joint_terms:
        logger.warning("two passes a step instead of one: %s", made)
    elif rank() == 0:
        logger.info("task rows are padded and launched kernel by kernel: %s", made)
    return TwoPassEngine(run)
