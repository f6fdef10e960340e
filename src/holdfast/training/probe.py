"""Looking at the constraints between steps: degradations of fixed rows of each safety set, without a gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.ranks import world
from holdfast.core.seeding import generator
from holdfast.core.units import KL_UNITS
from holdfast.data.encode import Encoded
from holdfast.scoring.forward import Forward
from holdfast.scoring.reference_states import KeptReference

if TYPE_CHECKING:
    from holdfast.training.run import Run

PROBED = 64  # examples that are passed over at one time on one process, or as many as its device has room for


def on_whole_set(constraint: ChanceConstraint, degradations: Tensor) -> ChanceConstraint:
    """The constraint as it is for these examples: cvar's threshold adapts, and the best one is their own quantile."""
    if constraint.majorizer != "cvar":
        return constraint
    return constraint.with_threshold(float(torch.quantile(degradations, 1.0 - constraint.alpha)))


def looked_at(run: Run, name: str, places: list[int]) -> Tensor:
    """D_i of these rows of a constraint split at the current parameters; float64, on the CPU.

    Packed in one pass where steps are fused, on one process; else as an evaluation does.
    """
    from holdfast.training.fused_engine import FusedEngine

    engine, one = run.engine, run.data.safety[name]
    if isinstance(engine, FusedEngine) and world() == 1:
        return run.fitting.evaluation(PROBED, lambda rows: engine.look(name, places, rows))
    examples, reference = one.rows(places), one.constraint_reference[places]
    return run.fitting.evaluation(
        run.forward.batch_size,
        lambda rows: run.forward.resized(rows).degradations(examples, reference, one.constraint),
    )


class ConstraintProbe:
    """The same examples of each safety set whenever it is asked.

    A batch of a few rows says little about g, and the filter's own estimate is what is to be checked. The rows are the
    first `rows` of a permutation of the constraint split, by the safety seed.
    """

    def __init__(self, run: Run, rows: int) -> None:
        self._run = run
        self.places = {
            name: generator(run.args.stream_seed, f"probe {name}").permutation(len(one.constraint_set))[:rows].tolist()
            for name, one in run.data.safety.items()
        }
        self._kept: dict[tuple[str, int], KeptReference] = {}

    def measure(self) -> dict[str, float]:
        """g of every safety set at the current parameters."""
        found = {}
        for name in self.places:
            d = self.degradations(name)
            found[name] = float(on_whole_set(self._run.data.safety[name].constraint, d).value(d))
        return found

    def degradations(self, name: str) -> Tensor:
        """D_i of a set's rows at the current parameters; float64, on the CPU."""
        run, one, places = self._run, self._run.data.safety[name], self.places[name]
        examples, reference = one.rows(places), one.constraint_reference[places]
        return run.fitting.evaluation(
            PROBED if world() == 1 else run.forward.batch_size,
            lambda rows: self._forward(name, examples, rows).degradations(examples, reference, one.constraint),
        )

    def _forward(self, name: str, examples: list[Encoded], rows: int) -> Forward:
        """With what is kept of theta_0, from the batches in which the model itself is passed over: rounding cancels."""
        forward = self._run.forward.resized(rows)
        if forward.kept is not None or self._run.data.safety[name].constraint.unit not in KL_UNITS:
            return forward
        if (name, rows) not in self._kept:
            with self._run.theta_0.active():
                self._kept[name, rows] = KeptReference.of(forward, examples)
        return replace(forward, kept=self._kept[name, rows])
