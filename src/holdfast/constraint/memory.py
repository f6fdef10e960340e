"""What the filter remembers from step to step, and therefore belongs in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from holdfast.constraint.anchor import Anchor, Limit
from holdfast.constraint.event import Event
from holdfast.constraint.gradients import ParameterSpace, Vector
from holdfast.constraint.problem import FilterProblem
from holdfast.core.errors import CheckpointError, ConfigError, InfeasibleError, NumericalError

NORM_DECAY = 0.9  # average of norm(s_nom), so that one tiny nominal step does not close the trust region
SAFETY_BETA2 = 0.999  # second moment of the constraint's gradient, as Adam's default
NONFINITE_LIMIT, NONFINITE_WINDOW = 3, 100
RESTORATION_LIMIT, RESTORATION_FALL = 50, 0.9
DUAL_DECAY = 0.95  # average of norm(h_k)^2, by which a dual term is scaled
LARGEST = 10.0  # of a dual term: the task's gradient keeps a tenth
PLAIN = ("steps", "moment_steps", "nominal_norm", "relief", "nonfinite_steps", "restoring", "restoring_from")


@dataclass
class DualTerm:
    """A dual term in the optimizer's own gradient, so that the filter on top of it has less to correct.

    The optimizer's gradient becomes

        grad f + sum_k r_k (norm(grad f) / n_k) h_k,      r_k >= 0,

    where n_k is the root mean square of norm(h_k) over the last batches: a batch whose rows have hardly moved says
    little, and its gradient is not stretched to say as much as another's. Where constraint k is not measured h_k is an
    average, and n_k its own norm. Neither the scale of g nor that of the loss matters. r_k follows the sign and size of
    what the step before wanted of the correction, its nominal step s against the barrier `h_k . s <= -gamma v_k`:

        r_k <- clip(r_k + dual (h_k . s + gamma v_k) / (|h_k . s| + gamma |v_k|), 0, LARGEST).

    At rest the nominal step meets the barrier by itself, or r_k = 0 and there is room. A slack constraint adds nothing.
    """

    ratios: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)  # averages of norm(h_k)^2, not debiased
    batches: list[int] = field(default_factory=list)  # in them

    def fold_norms(self, norms: Sequence[float], measured: Sequence[bool]) -> list[float]:
        """Take the squared norms of a batch's h_k into their averages, and return these, debiased.

        Of constraints that were not measured the norms are returned as they are.
        """
        self.squares, self.batches = self.squares or [0.0] * len(norms), self.batches or [0] * len(norms)
        squares = list(norms)
        for k in (k for k, seen in enumerate(measured) if seen):
            self.squares[k] += (1.0 - DUAL_DECAY) * (norms[k] - self.squares[k])
            self.batches[k] += 1
            squares[k] = self.squares[k] / (1.0 - DUAL_DECAY ** self.batches[k])
        return squares

    @property
    def acts(self) -> bool:
        """Whether it adds anything: a gradient of zeros would still move parameters that have none."""
        return any(self.ratios)

    def lengths(
        self, space: ParameterSpace, gradients: Sequence[Vector], measured: Sequence[bool]
    ) -> tuple[list[float], float]:
        """`norm(h_k)^2` and `norm(grad f)^2`; 0 for those that nothing needs: without the term, of what is measured."""
        task = [space.task_gradient()] if self.acts else []
        needed = [k for k, seen in enumerate(measured) if seen or self.acts]
        found = space.dots([(h, h) for h in [*(gradients[k] for k in needed), *task]]) if needed else []
        norms = dict(zip(needed, found, strict=False))
        return [norms.get(k, 0.0) for k in range(len(gradients))], sum(found[len(needed) :])

    def add(self, space: ParameterSpace, gradients: Sequence[Vector], squares: Sequence[float], task: float) -> None:
        """Add the term to `.grad`, of the joined h_k, the squares of their n_k and of `norm(grad f)`."""
        if not self.acts:
            return
        norm = math.sqrt(task)
        weights = [r * norm / math.sqrt(h) if h > 0.0 else 0.0 for r, h in zip(self.ratios, squares, strict=True)]
        space.add_to_gradient([space.split(h) for h in gradients], weights)

    def follow(self, problem: FilterProblem, dual: float) -> None:
        """Move every r_k by what the nominal step lacks, as a share of its own terms."""
        wanted = problem.inner + problem.target
        size = np.abs(problem.inner) + np.abs(problem.target)
        moves = np.divide(wanted, size, out=np.zeros_like(size), where=size > 0.0)
        before = self.ratios or [0.0] * len(moves)
        moved = [old + dual * float(move) for old, move in zip(before, moves, strict=True)]
        self.ratios = [min(max(ratio, 0.0), LARGEST) for ratio in moved]


@dataclass
class FilterMemory:
    """Averages of the constraint's gradients, and counts of what must not go on for long. Vectors are joined."""

    steps: int = 0  # filtered steps, discarded ones not counted
    averages: list[Vector] = field(default_factory=list)  # of each constraint's gradient, exponential, not debiased
    safety_moment: Vector | None = None  # average of max_k h_k^2 (adam_unit: of unit gradients), not debiased
    moment_steps: int = 0  # in it
    dual_term: DualTerm = field(default_factory=DualTerm)
    nominal_norm: float = 0.0  # average of norm(s_nom)
    anchor: Anchor | None = None  # theta_0 and the distance from it, where steps are pulled back
    relief: list[float] = field(default_factory=list)  # what corrections have taken since constraints were measured
    nonfinite_steps: list[int] = field(default_factory=list)  # when recent steps were discarded
    restoring: int = 0  # restoration steps in a row
    restoring_from: float = 0.0  # the value they began at

    def fold_moment(self, gradients: Sequence[Vector | None], norms: Sequence[float], metric: str) -> None:
        """Count a step, and update the second moment that the metric needs with its gradients, of these squared norms.

        `adam`: `max_k h_k^2`. `adam_unit`: `max_k h_k^2 / norm(h_k)^2`, whatever the constraints' scales; a zero
        gradient has no direction and is left out, as is a constraint that was not measured, None.
        """
        self.steps += 1
        before = self.relief or [0.0] * len(gradients)
        self.relief = [old if h is None else 0.0 for old, h in zip(before, gradients, strict=True)]
        unit, both = metric == "adam_unit", zip(gradients, norms, strict=True)
        seen = [(h, norm) for h, norm in both if h is not None and (norm > 0.0 or not unit)]
        if metric == "identity" or not seen:
            return
        square: Vector = []
        for h, norm in seen:
            own = list(torch._foreach_mul(h, h))
            if unit:
                torch._foreach_div_(own, norm)
            if square:
                torch._foreach_maximum_(square, own)
            else:
                square = own
        if self.safety_moment is None:
            self.safety_moment = [torch.zeros_like(x) for x in square]
        self.moment_steps += 1
        torch._foreach_lerp_(self.safety_moment, square, 1.0 - SAFETY_BETA2)

    def debiased_moment(self) -> Vector | None:
        """`v_safe` as Adam would debias it; None while there is none."""
        if self.safety_moment is None:
            return None
        return list(torch._foreach_div(self.safety_moment, 1.0 - SAFETY_BETA2**self.moment_steps))

    def fold_gradients(self, gradients: Sequence[Vector | None], decay: float) -> list[Vector]:
        """Update the averages and return them as `gradients` does: the first is the batch's own gradient."""
        if not self.averages:
            self.averages = [[torch.zeros_like(x) for x in gradient or ()] for gradient in gradients]
        if len(self.averages) != len(gradients):
            raise ConfigError(
                f"{len(gradients)} constraints given, {len(self.averages)} before",
                remedy="pass the same constraints at every step",
            )
        for k, (average, gradient) in enumerate(zip(self.averages, gradients, strict=True)):
            if gradient is not None:
                torch._foreach_lerp_(average, gradient, 1.0 - decay)
                if self.anchor is not None:
                    self.anchor.fold_distance(k, decay)
        return [self.gradient(k, decay) for k in range(len(gradients))]

    def stand_in(self, k: int, decay: float) -> Vector:
        """The average that stands for a constraint which a step does not measure."""
        if not self.averages or self.anchor is None or not self.anchor.mean_distances[k] > 0.0:
            raise ConfigError(
                f"constraint {k + 1} is not measured, and there is no average that could stand for it",
                remedy="use an anchor or verified steps and a gradient_decay above 0, and measure every constraint at "
                "theta_0 and away from it first",
            )
        return self.gradient(k, decay)

    def gradient(self, k: int, decay: float) -> Vector:
        """An average, debiased; with an anchor, scaled from its mean distance from theta_0 to today's."""
        divisor = 1.0 - decay**self.steps
        if self.anchor is not None and self.anchor.distance > 0.0:
            divisor = self.anchor.mean_distances[k] / self.anchor.distance
        return list(torch._foreach_div(self.averages[k], divisor))

    def relieve(self, taken: Sequence[float]) -> None:
        """Count what a corrected step has taken."""
        before = self.relief or [0.0] * len(taken)
        self.relief = [old + new for old, new in zip(before, taken, strict=True)]

    def relieved(self, estimates: Sequence[float], measured: Sequence[bool]) -> list[float]:
        """The estimates; of what is not measured less what corrections have taken since it was.

        A prediction goes by the distance alone, and each of the steps in between would undo the same violation once
        more.
        """
        relief = self.relief or [0.0] * len(estimates)  # not in checkpoints of earlier versions
        each = zip(estimates, relief, measured, strict=True)
        return [estimate if seen else estimate - taken for estimate, taken, seen in each]

    def fold_norm(self, norm: float) -> None:
        """Update the average length of the optimizer's own steps."""
        before = self.nominal_norm
        self.nominal_norm = norm if before == 0.0 else NORM_DECAY * before + (1.0 - NORM_DECAY) * norm

    def count_nonfinite(self, what: str) -> None:
        """Count a discarded step, for what was not finite in words, and stop when there are too many."""
        recent = [*self.nonfinite_steps, self.steps]
        self.nonfinite_steps = [step for step in recent if step > self.steps - NONFINITE_WINDOW]
        if self.anchor is not None:
            # what this step measured may be lost: the next one measures
            self.anchor.measured_at = [0.0] * len(self.anchor.measured_at)
        if len(self.nonfinite_steps) > NONFINITE_LIMIT:
            raise NumericalError(
                f"non-finite loss, gradient or constraint in {len(self.nonfinite_steps)} of the last "
                f"{NONFINITE_WINDOW} steps; each was discarded (the last: {what})",
                remedy="lower the learning rate, check the data for extreme examples, or train in float32",
            )

    def watch_restoration(
        self, name: Event, values: Sequence[float], limits: Sequence[Limit] = (), at_distance: Sequence[float] = ()
    ) -> None:
        """Stop when a constraint stays violated and restoring it makes no headway.

        Up to its ceiling, where it has one, a constraint uses its reserve and is not violated. In a step that measures
        nothing, `at_distance` counts: what corrections are predicted to have taken is no headway yet.
        """
        known = at_distance or values
        value, restores = max(known), name in (Event.RESTORATION, Event.INFEASIBLE)
        within = bool(limits) and all(v <= limit.ceiling for v, limit in zip(known, limits, strict=True))
        if within or not restores:
            self.restoring = self.restoring if at_distance and not within else 0
            return
        if self.restoring == 0:
            self.restoring_from = value
        self.restoring += 1
        if self.restoring < RESTORATION_LIMIT:
            return
        if value > RESTORATION_FALL * self.restoring_from:
            raise InfeasibleError(
                f"the constraint is violated (g + rho = {value:.4g}) and {self.restoring} restoration steps did not "
                f"reduce it by {1 - RESTORATION_FALL:.0%} (from {self.restoring_from:.4g})",
                remedy="look for contradictory safety examples, raise tau or alpha, or lower the learning rate",
            )
        self.restoring = 0

    def state_dict(self, space: ParameterSpace) -> dict[str, object]:
        """Plain numbers and whole tensors (a collective call for sharded parameters)."""
        return {
            **{name: getattr(self, name) for name in PLAIN},
            "averages": [space.full(space.split(average)) for average in self.averages],
            "safety_moment": None if self.safety_moment is None else space.full(space.split(self.safety_moment)),
            "dual_ratios": list(self.dual_term.ratios),
            "dual_squares": list(self.dual_term.squares),
            "dual_batches": list(self.dual_term.batches),
            "anchor": None if self.anchor is None else self.anchor.state_dict(space),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], space: ParameterSpace, *, own: Anchor | None) -> FilterMemory:
        """The inverse of `state_dict`; refuses one with an anchor where none is wanted, and one without where it is."""
        moment, anchor = state["safety_moment"], state.get("anchor")  # which earlier versions lack
        kinds = {None: "neither", True: "an anchor", False: "verified steps alone"}
        stored, wanted = None if anchor is None else anchor.get("pulls", True), None if own is None else own.pulls
        if stored != wanted:
            raise CheckpointError(
                f"the filter's stored state is of one with {kinds[stored]}, this filter has {kinds[wanted]}",
                remedy="make the filter with the same anchor and verified, or begin a new training",
            )
        known = {"moment_steps": state["steps"], "relief": [], **state}
        # Not in checkpoints of earlier versions, or one count for all.
        squares, batches = list(state.get("dual_squares", [])), state.get("dual_batches", 0)
        counts = [batches] * len(squares) if isinstance(batches, int) else list(batches)
        return cls(
            **{name: known[name] for name in PLAIN},
            averages=[space.join(space.scatter(average)) for average in state["averages"]],
            safety_moment=None if moment is None else space.join(space.scatter(moment)),
            dual_term=DualTerm(list(state.get("dual_ratios", [])), squares, counts),
            anchor=None if own is None else Anchor.from_state(state["anchor"], space, pulls=own.pulls),
        )
