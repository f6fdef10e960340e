"""What the constrained defenses share: a constraint followed over the steps, and steering by a safety filter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from holdfast.constraint.barrier import Event
from holdfast.constraint.chance import ChanceConstraint
from holdfast.constraint.degradation import slope
from holdfast.constraint.estimators import Estimator, TailThreshold, make_estimator
from holdfast.constraint.filter import SafetyFilter
from holdfast.constraint.gradients import Vector
from holdfast.trainers.hooks import Defense, Inputs, Row, TrainingRun
from holdfast.trainers.safety import SafetySet
from holdfast.trainers.support import require_float32


class MovingConstraint:
    """A chance constraint; with the cvar majorizer, the start of its tail follows the degradations seen."""

    def __init__(self, safety: SafetySet, decay: float = 0.9) -> None:
        self.now: ChanceConstraint = safety.constraint
        self.tail: TailThreshold | None = None
        if self.now.majorizer == "cvar":
            c, size = self.now, len(safety.constraint_set)
            self.tail = TailThreshold(size, tau=c.tau, alpha=c.alpha, decay=decay, start=c.cvar_t)

    def follow(self, index: Tensor, degradations: Tensor) -> None:
        """Take in one batch: positions in the constraint split and their degradations."""
        if self.tail is not None:
            self.now = self.now.with_threshold(self.tail.update(index, degradations))

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"cvar_t": self.now.cvar_t}
        if self.tail is not None:
            state["tail"] = dict(self.tail.state_dict())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.tail is not None:
            self.tail.load_state_dict(state["tail"])
            self.now = self.now.with_threshold(state["cvar_t"])


class Steering:
    """The running estimate of one constraint, `mean_i terms(D)_i - limit + margin <= 0`.

    Here the chance constraint: terms `phi(D - tau)`, limit alpha, margin rho.

    Args:
        config: with `estimator` and `decay`.
    """

    def __init__(self, safety: SafetySet, config: Any) -> None:
        self.moving = MovingConstraint(safety, config.decay)
        self.limit, self.margin = self.constraint.alpha, self.constraint.buffer
        self.estimator: Estimator = make_estimator(
            config.estimator, size=len(safety.constraint_set), start_phi=self.start(), decay=config.decay
        )
        self.row: Row = {}
        self.inactive = 0.0
        """Share of the last batch's rows whose term is flat: their gradient is zero."""

    @property
    def constraint(self) -> ChanceConstraint:
        """The run's chance constraint as it is now."""
        return self.moving.now

    @property
    def feasible_start(self) -> bool:
        """Whether the unchanged model satisfies the constraint."""
        return self.constraint.feasible_start

    def terms(self, degradations: Tensor) -> Tensor:
        """One differentiable value per example, of whose mean the constraint speaks."""
        return self.constraint.phi(degradations)

    def start(self) -> float:
        """The term of an example that has not degraded."""
        return self.constraint.start_value() + self.constraint.alpha

    def figures(self, degradations: Tensor) -> Row:
        """What the batch looks like, beside the constraint's own value."""
        c = self.constraint
        return {"violation_rate": c.violation_rate(degradations), "cvar": c.cvar(degradations)}

    def measure(self, run: TrainingRun, name: str) -> tuple[float, float, Vector]:
        """This step's value with its margin on the batch, its running estimate, and the batch gradient."""
        batch, gradient = run.safety_pass(name, self.terms)
        d = batch.degradations
        terms = self.terms(d)
        on_batch = float(terms.mean()) - self.limit + self.margin
        self.row = {"g": None, "violation_rate": None, "cvar": None}
        if not math.isfinite(on_batch):
            return math.nan, math.nan, gradient  # the filter discards the step; nothing may enter the averages
        estimate = self.estimator.update(batch.index, terms) - self.limit + self.margin
        self.row = {"g": estimate - self.margin, **self.figures(d)}
        self.inactive = float((slope(self.terms, d) == 0).double().mean())
        self.moving.follow(batch.index, d)
        return on_batch, estimate, gradient

    def state_dict(self) -> dict[str, Any]:
        return {"estimator": dict(self.estimator.state_dict()), **self.moving.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.estimator.load_state_dict(state["estimator"])
        self.moving.load_state_dict(state)


class FilteredDefense(Defense):
    """Training whose every step a `SafetyFilter` corrects, as little as the constraints' barriers ask for.

    Its config has `space`, `rate`, `metric`, `trust_region`, `estimator` and `decay`.
    """

    packs = True
    joint_terms = True
    config: Any

    def steer(self, safety: SafetySet) -> Steering:
        """The constraint to follow on one safety set."""
        return Steering(safety, self.config)

    def validate(self, run: TrainingRun) -> None:
        """Trainable weights must be float32: in bfloat16 the applied step is mostly rounding."""
        require_float32(run.model)

    def attach(self, run: TrainingRun) -> None:
        """Make the filter on the optimizer and one estimator per constraint."""
        c = self.config
        self._filter = SafetyFilter(
            run.optimizer,
            rate=c.rate,
            space=c.space,
            metric=c.metric,
            trust_region=c.trust_region,
            gradient_decay=0.0 if c.estimator == "batch" else c.decay,
        )
        self._steering = {name: self.steer(safety) for name, safety in run.safety.items()}
        self._infeasible_start = [n for n, s in self._steering.items() if not s.feasible_start]
        self._inactive = 0.0

    def micro_step(self, run: TrainingRun, inputs: Inputs, backward: Callable[[], Tensor]) -> Tensor:
        """The task's gradient, and in a fused step every constraint's with it."""
        if not run.joint:
            return backward()
        weights = {name: steering.terms for name, steering in self._steering.items()}
        return run.joint_micro_step(inputs, run.items, weights, skip=self._skips(run))

    def _skips(self, run: TrainingRun) -> bool:
        """Whether to look at the safety rows first: while, on average over the last steps, most of them are left out.

        Looking costs a forward of all rows, half of what forward and backward of a row cost (a third with
        checkpointing); it has to save clearly more than that.
        """
        if run.args.skip_inactive_rows != "auto":
            return bool(run.args.skip_inactive_rows == "on")
        return self._inactive > (0.6 if run.args.gradient_checkpointing else 0.75)

    def on_gradient(self, run: TrainingRun) -> None:
        """Measure every constraint at theta and announce it to the filter."""
        found = [steering.measure(run, name) for name, steering in self._steering.items()]
        values, estimates, gradients = zip(*found, strict=True)
        share = min(steering.inactive for steering in self._steering.values())
        self._inactive += 0.1 * (share - self._inactive)
        self._first = run.step == 0
        self._filter.arm(values, gradients, estimates)

    def skip_step(self, run: TrainingRun) -> None:
        """Let the optimizer's empty step pass; nothing is measured or remembered."""
        self._filter.skip()

    def row(self) -> Row:
        """The filter's event and the constraints' figures."""
        event = self._filter.last_event
        if event is None:
            return {}
        multipliers = dict(zip(self._steering, event.multipliers, strict=True))
        values = dict(zip(self._steering, event.values, strict=True))
        each = {
            name: {**s.row, "value": values[name], "multiplier": multipliers[name]}
            for name, s in self._steering.items()
        }
        name = Event.INFEASIBLE_START if self._first and self._infeasible_start else event.name
        return one_row(
            {
                "event": str(name),
                "residual": event.residual,
                "correction_ratio": event.correction_ratio,
                "cosine": event.cosine,
                "active": float(event.corrected),
            },
            each,
        )

    def state_dict(self) -> dict[str, Any]:
        """Filter memory and estimators."""
        return {
            "filter": self._filter.state_dict(),
            "inactive": self._inactive,
            "steering": {name: s.state_dict() for name, s in self._steering.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._filter.load_state_dict(state["filter"])
        self._inactive = float(state.get("inactive", 0.0))  # not in checkpoints of earlier versions
        for name, steering in self._steering.items():
            steering.load_state_dict(state["steering"][name])


def one_row(common: Row, each: dict[str, Row]) -> Row:
    """A step's row: the first constraint's figures at the top, and with several all of them by name."""
    row = {**common, **next(iter(each.values()))}
    return row if len(each) == 1 else {**row, "constraints": each}


def batch_figures(constraint: ChanceConstraint, degradations: Tensor) -> Row:
    """g, violation rate and CVaR of one batch; None where something is not finite."""
    if not bool(torch.isfinite(degradations).all()):
        return {"g": None, "violation_rate": None, "cvar": None}
    value = float(constraint.value(degradations))
    return {
        "g": value if math.isfinite(value) else None,
        "violation_rate": constraint.violation_rate(degradations),
        "cvar": constraint.cvar(degradations),
    }
