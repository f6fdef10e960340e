"""What the constrained defenses share: a constraint followed over the steps, and its running estimate."""

import math
from typing import Any

import torch
from torch import Tensor

from holdfast.constraint.chance import ChanceConstraint
from holdfast.constraint.estimators import Estimator, TailThreshold, make_estimator
from holdfast.scoring.degradation import slope
from holdfast.training.hooks import Row
from holdfast.training.safety import SafetySet
from holdfast.training.step import Measured


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

    Here the chance constraint: terms `phi(D - tau)`, limit alpha, margin `rho + reserve alpha`.

    Args:
        config: with `estimator`, `decay`, `value_decay` and `reserve`.
    """

    def __init__(self, safety: SafetySet, config: Any) -> None:
        self.moving = MovingConstraint(safety, config.decay)
        self.limit = self.constraint.alpha
        self.margin = self.constraint.buffer + config.reserve * self.limit
        decay = config.decay if config.value_decay is None else config.value_decay
        self.estimator: Estimator = make_estimator(
            config.estimator, size=len(safety.constraint_set), start_phi=self.start(), decay=decay
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

    def estimate(self, measured: Measured) -> tuple[float, float]:
        """The constraint's value with its margin: on this batch, and as the running estimate that takes it in."""
        d = measured.degradations
        terms = self.terms(d)
        on_batch = float(terms.mean()) - self.limit + self.margin
        self.row = {"g": None, "violation_rate": None, "cvar": None}
        if not math.isfinite(on_batch):
            return math.nan, math.nan  # the filter discards the step; nothing may enter the averages
        estimate = self.estimator.update(measured.index, terms) - self.limit + self.margin
        self.row = {"g": estimate - self.margin, **self.figures(d)}
        self.inactive = float((slope(self.terms, d) == 0).double().mean())
        self.moving.follow(measured.index, d)
        return on_batch, estimate

    def state_dict(self) -> dict[str, Any]:
        return {"estimator": dict(self.estimator.state_dict()), **self.moving.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.estimator.load_state_dict(state["estimator"])
        self.moving.load_state_dict(state)


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
