"""What the constrained defenses share: a constraint followed over the steps, and its running estimate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdfast.constraint.anchor import Anchor, Limit, Verify
from holdfast.constraint.chance import ChanceConstraint
from holdfast.constraint.draws import ImportanceDraws
from holdfast.constraint.estimators import EmaEstimator, Estimator, TailThreshold, make_estimator
from holdfast.constraint.feasibility import require_room
from holdfast.core.errors import ConfigError
from holdfast.scoring.degradation import slope
from holdfast.training.hooks import Row, TrainingRun
from holdfast.training.safety import SafetySet
from holdfast.training.side_pass import weighted
from holdfast.training.step import Measured

if TYPE_CHECKING:
    from holdfast.training.config import SafetyArguments

STRAIGHT, LARGEST = 30.0, 690.0
"""Exponents: beyond the first entropic terms go on as straight lines, as their slopes are float32 (rows that far from
the limit, above or below, weigh alike); beyond the second phi is cut."""


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

    def state_dict(self) -> dict[str, object]:
        return {"cvar_t": self.now.cvar_t} | ({} if self.tail is None else {"tail": self.tail.state_dict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.tail is not None:
            self.tail.load_state_dict(state["tail"])
            self.now = self.now.with_threshold(state["cvar_t"])


class Steering:
    """The running estimate of one constraint, `mean_i terms(D)_i - limit + margin <= 0`.

    Here the chance constraint: terms `phi(D - tau)`, limit alpha, margin `rho + reserve alpha`.

    Entropic, with M the running estimate of mean_i phi:  `log(M / (limit - margin)) / beta <= 0`.  Its gradient is that
    of the batch, sum_i w_i grad D_i with w_i = phi_i / sum_j phi_j. Weights by M instead would be nearly zero in every
    batch without the worst rows: the filter then made large corrections along noise.
    """

    def __init__(self, safety: SafetySet, config: Any) -> None:
        self.moving = MovingConstraint(safety, config.decay)
        self.limit = self.constraint.alpha
        self.buffer = self.constraint.buffer
        self.margin = self.buffer + config.reserve * self.limit
        self.entropic = self.constraint.majorizer == "entropic"
        decay = config.decay if config.value_decay is None else config.value_decay
        self.estimator: Estimator = make_estimator(
            config.estimator, size=len(safety.constraint_set), start_phi=self.start(), decay=decay
        )
        self.draws = ImportanceDraws(len(safety.constraint_set)) if config.draw == "importance" else None
        if self.draws is not None and self.entropic:
            raise ConfigError(
                "draw importance with the entropic majorizer, whose gradient is a ratio of means",
                remedy="use draw pass, or another majorizer",
            )
        require_room(self.start(), self.limit, self.margin, config.reserve, allowed=not self.constraint.feasible_start)
        # Entropic: the least mean phi that counts, since it has a logarithm.
        self.least = max(1e-3 * min(self.start(), self.limit - self.margin), 1e-300)
        self.pace: tuple[int, int] = config.every, config.rest
        self.row: Row = {}
        self.inactive = 0.0  # share of the last batch's rows whose term is flat: their gradient is zero

    @property
    def constraint(self) -> ChanceConstraint:
        """The run's chance constraint as it is now."""
        return self.moving.now

    @property
    def feasible_start(self) -> bool:
        """Whether the unchanged model satisfies the constraint with its margin."""
        return bool(self.start() - self.limit + self.margin <= 1e-12)

    def terms(self, degradations: Tensor) -> Tensor:
        """One differentiable value per example, the gradient of whose mean is taken.

        Entropic: `phi / (beta limit)`, as a straight line outside of e^-30 .. e^30.
        """
        if not self.entropic:
            return self.constraint.phi(degradations)
        c = self.constraint
        z = c.beta * (degradations - c.tau) - math.log(self.limit)
        bent = z.clamp(-STRAIGHT, STRAIGHT)
        return bent.exp() * (1 + z - bent) / c.beta

    def _phi(self, degradations: Tensor) -> Tensor:
        """exp(beta z), cut where float64 ends; the slopes of `terms` are not."""
        return (self.constraint.beta * (degradations - self.constraint.tau)).clamp(max=LARGEST).exp()

    def start(self) -> float:
        """The term of an example that has not degraded."""
        return self.constraint.start_value() + self.constraint.alpha

    def value(self, mean: float, margin: float) -> float:
        """The constraint's value where the terms have this mean."""
        if self.entropic:
            return math.log(max(mean, self.least) / (self.limit - margin)) / self.constraint.beta
        return mean - self.limit + margin

    def figures(self, degradations: Tensor, weights: Tensor | None = None) -> Row:
        """What the batch looks like, beside the constraint's own value; of a weighted batch its share of violations."""
        if weights is None:
            return tail_figures(self.constraint, degradations)
        beyond = (degradations > self.constraint.tau).to(weights)
        return {"violation_rate": min(1.0, float((weights * beyond).mean())), "cvar": None}

    def _floor(self) -> float:
        """The least term that is known away from theta_0, or that at theta_0."""
        return self.estimator.floor if math.isfinite(self.estimator.floor) else self.start()

    def limit_of_steps(self) -> Limit:
        """The floor of the value, and the ceiling of a single step: half of the reserve is left.

        A floor above the ceiling is no rounding (a first step that went too far): then the start's counts.
        """
        ceiling, floor = self.limit - (self.margin + self.buffer) / 2, self.estimator.floor
        floor = floor if floor < ceiling else self.start()
        return Limit(self.value(floor, self.margin), self.value(ceiling, self.margin))

    def estimate(
        self, measured: Measured, anchor: Anchor | None = None, weights: Tensor | None = None
    ) -> tuple[float, float]:
        """The constraint's value with its margin: on this batch, and as the running estimate that takes it in.

        With an anchor the estimate follows the distance from theta_0. `weights`: of rows that were not drawn alike.
        Entropic: the measured gradient is divided in place by the sum of its weights.
        """
        d, square = measured.degradations, None if anchor is None else anchor.distance**2
        seen = self._phi(d) if self.entropic else self.terms(d)
        self.row = {"g": None, "violation_rate": None, "cvar": None}
        if not math.isfinite(float(seen.mean() + d.mean())):
            return math.nan, math.nan  # the filter discards the step; nothing may enter the averages
        slopes, terms = slope(self.terms, d), weighted(seen, weights)
        self.inactive = float((slopes == 0).double().mean())
        estimate = self.estimator.update(measured.index, terms, square)
        if self.entropic:
            torch._foreach_div_(measured.gradient, float(slopes.mean()))
        if self.draws is not None:
            self.draws.remember(measured.index, seen, square, self._floor())
        self.row = {"g": self.value(estimate, 0.0), **self.figures(d, weights)}
        self.moving.follow(measured.index, d)
        return self.value(float(terms.mean()), self.margin), self.value(estimate, self.margin)

    def verify(
        self, index: Tensor, degradations: Tensor, weights: Tensor | None, anchor: Anchor, batches: int
    ) -> float:
        """The value with its margin on rows that were looked at where a step has ended; counts as so many batches."""
        terms, square = self._phi(degradations) if self.entropic else self.terms(degradations), anchor.distance**2
        mean = float(weighted(terms, weights).mean())
        if math.isfinite(mean):
            floor = self.estimator.floor
            if isinstance(self.estimator, EmaEstimator):
                for _ in range(batches):
                    self.estimator.absorb(mean, square)
            self.estimator.floor = floor  # of batches: the verified mean itself is not what rounding adds
            if self.draws is not None:
                self.draws.remember(index, terms, square, self._floor())
        return self.value(mean, self.margin) if math.isfinite(mean) else math.inf

    def predict(self, anchor: Anchor) -> float:
        """The value with its margin at this distance from theta_0, in a step that measures nothing."""
        estimate = self.estimator.predict(anchor.distance**2)
        self.row = {"g": self.value(estimate, 0.0), "violation_rate": None, "cvar": None}
        return self.value(estimate, self.margin)

    def due(self, step: int, k: int, anchor: Anchor | None) -> bool:
        """Whether this step measures constraint k: one in `every` does; at ease one in `rest`, rounded up."""
        if anchor is None or not anchor.fresh(k):
            return True
        every, rest = self.pace
        return step % (-(-rest // every) * every if rest > 1 and self.at_ease(anchor) else every) == 0

    def at_ease(self, anchor: Anchor) -> bool:
        """Whether the constraint is predicted to use less than half of the room between its floor and its ceiling."""
        limit, value = self.limit_of_steps(), self.value(self.estimator.predict(anchor.distance**2), self.margin)
        return value - limit.floor < 0.5 * (limit.ceiling - limit.floor)

    def state_dict(self) -> dict[str, object]:
        drawn = {} if self.draws is None else {"draws": self.draws.state_dict()}
        return {"estimator": self.estimator.state_dict(), **self.moving.state_dict(), **drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.estimator.load_state_dict(state["estimator"])
        self.moving.load_state_dict(state)
        if self.draws is not None:
            self.draws.load_state_dict(state["draws"])


def choose_rows(run: TrainingRun, each: Mapping[str, Steering]) -> None:
    """Draw the step's batch of every set whose rows are drawn by importance."""
    for name, steering in each.items():
        if steering.draws is not None:
            run.data.choose(name, steering.draws)


def verifier(run: TrainingRun, each: Mapping[str, Steering], anchor: Anchor | None, rows: int) -> Verify | None:
    """What measures all values on `rows` rows of each set where a step has ended; they count as batches of the step."""
    if anchor is None or not rows:
        return None

    def values() -> list[float]:
        looked = {name: run.data.look(name, rows, steering.draws) for name, steering in each.items()}
        batches = {name: max(1, len(looked[name][0]) // len(run.data.safety_batch(name))) for name in each}
        return [steering.verify(*looked[name], anchor, batches[name]) for name, steering in each.items()]

    return values


def looks_first(args: SafetyArguments, inactive: float) -> bool:
    """Whether to look at the safety rows first: while, on average over the last steps, most of them are left out.

    Looking costs a forward of all rows, half of what forward and backward of a row cost (a third with checkpointing);
    it has to save clearly more than that.
    """
    if args.skip_inactive_rows != "auto":
        return bool(args.skip_inactive_rows == "on")
    return inactive > (0.6 if args.gradient_checkpointing else 0.75)


def one_row(common: Row, each: dict[str, Row]) -> Row:
    """A step's row: the first constraint's figures at the top, and with several all of them by name."""
    row = {**common, **next(iter(each.values()))}
    return row if len(each) == 1 else {**row, "constraints": each}


def batch_figures(constraint: ChanceConstraint, degradations: Tensor) -> Row:
    """g, violation rate and CVaR of one batch; None where something is not finite."""
    if not bool(torch.isfinite(degradations).all()):
        return {"g": None, "violation_rate": None, "cvar": None}
    value = float(constraint.value(degradations))
    return {"g": value if math.isfinite(value) else None, **tail_figures(constraint, degradations)}


def tail_figures(constraint: ChanceConstraint, degradations: Tensor) -> Row:
    """Violation rate and CVaR of one batch."""
    return {"violation_rate": constraint.violation_rate(degradations), "cvar": constraint.cvar(degradations)}
