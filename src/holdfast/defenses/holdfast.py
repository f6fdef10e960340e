"""The chance constraint, enforced at every optimizer step by a safety filter.

Reference: *Beyond Average Safety: Chance-Constrained LLM Fine-tuning*, equations (6)-(12) and Algorithm 1.
Stage: fine-tuning. Passes per step: task forward and backward, safety forward and backward. Side data: safety pairs.

Differs from the paper's text, each by a setting that restores it (`preset: paper`):
* `space="update"` corrects the step the optimizer takes, since AdamW does not keep the inequality that the filtered
  gradient satisfies; `space="gradient"` is Algorithm 1.
* `estimator="ema"` averages value and gradient over steps, since ten examples cannot express a rate of 5 %; `"batch"`
  does not.
* `rate=0.3`, the share of the slack one step may use; the paper's kappa = 1 / learning rate is `rate=1`.
* A run file that names no unit steers by `kl_token` where an adapter is trained; the paper's is `nll_sum`.
docs/log.md has the experiment behind these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

from holdfast.constraint.barrier import Event
from holdfast.constraint.chance import ChanceConstraint
from holdfast.constraint.estimators import Estimator, TailThreshold, make_estimator
from holdfast.constraint.filter import SafetyFilter, Space
from holdfast.constraint.filter_settings import check_settings
from holdfast.constraint.gradients import ParameterSpace, Vector
from holdfast.trainers.hooks import DEFENSES, Defense, Row, TrainingRun
from holdfast.trainers.safety import SafetySet


class _Steering:
    """The running estimate of one constraint."""

    def __init__(self, safety: SafetySet, config: Holdfast.Config) -> None:
        self.constraint: ChanceConstraint = safety.constraint
        size = len(safety.constraint_set)
        start = self.constraint.start_value() + self.constraint.alpha
        self.estimator: Estimator = make_estimator(config.estimator, size=size, start_phi=start, decay=config.decay)
        self.tail: TailThreshold | None = None
        if self.constraint.majorizer == "cvar":
            c = self.constraint
            self.tail = TailThreshold(size, tau=c.tau, alpha=c.alpha, decay=config.decay, start=c.cvar_t)
        self.row: Row = {}

    def measure(self, run: TrainingRun, name: str) -> tuple[float, float, Vector]:
        """This step's `g + rho` on the batch, its running estimate, and the batch gradient of g."""
        batch, gradient = run.safety_pass(name, self.constraint.phi)
        d, c = batch.degradations, self.constraint
        phi = c.phi(d)
        on_batch = float(phi.mean()) - c.alpha + c.buffer
        self.row = {"g": None, "violation_rate": None, "cvar": None}
        if not math.isfinite(on_batch):
            return math.nan, math.nan, gradient  # the filter discards the step; nothing may enter the averages
        estimate = self.estimator.update(batch.index, phi) - c.alpha + c.buffer
        self.row = {"g": estimate - c.buffer, "violation_rate": c.violation_rate(d), "cvar": c.cvar(d)}
        if self.tail is not None:
            self.constraint = c.with_threshold(self.tail.update(batch.index, d))
        return on_batch, estimate, gradient

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"estimator": dict(self.estimator.state_dict()), "cvar_t": self.constraint.cvar_t}
        if self.tail is not None:
            state["tail"] = dict(self.tail.state_dict())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.estimator.load_state_dict(state["estimator"])
        if self.tail is not None:
            self.tail.load_state_dict(state["tail"])
            self.constraint = self.constraint.with_threshold(state["cvar_t"])


@DEFENSES.register("holdfast")
@final
class Holdfast(Defense):
    """Chance-constrained fine-tuning."""

    name = "holdfast"
    stage = "finetune"
    summary = "chance constraint enforced at every step by a closed-form filter (ours)"
    passes = "2 forward + backward"
    needs = frozenset({"safety"})

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings of the filter and of the estimator.

        Attributes:
            space: what is corrected, `update` (the applied step) or `gradient` (Algorithm 1).
            rate: gamma, the share of the slack one step may use.
            metric: `auto`, `identity` or `adam`; update space only.
            trust_region: largest correction in multiples of the nominal step; update space only.
            estimator: `batch`, `ema` or `table`.
            decay: weight of the past in the averages of value and gradient.
        """

        space: Space = "update"
        rate: float = 0.3
        metric: str = "auto"
        trust_region: float = 3.0
        estimator: str = "ema"
        decay: float = 0.9

        def __post_init__(self) -> None:
            """Refuse values out of range where they are written, not when training begins."""
            check_settings(self.rate, self.space, self.metric, self.trust_region, self.decay)
            make_estimator(self.estimator, size=1, start_phi=0.0, decay=self.decay)

    config: Config

    def validate(self, run: TrainingRun) -> None:
        """Trainable weights must be float32: in bfloat16 the applied step is mostly rounding."""
        ParameterSpace([p for p in run.model.parameters() if p.requires_grad])

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
        self._steering = {name: _Steering(safety, c) for name, safety in run.safety.items()}
        self._infeasible_start = [n for n, s in run.safety.items() if not s.constraint.feasible_start]

    def on_gradient(self, run: TrainingRun) -> None:
        """Measure every constraint at theta and announce it to the filter."""
        found = [steering.measure(run, name) for name, steering in self._steering.items()]
        values, estimates, gradients = zip(*found, strict=True)
        self._first = run.step == 0
        self._filter.arm(values, gradients, estimates)

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
        row: Row = {
            "event": str(name),
            "residual": event.residual,
            "correction_ratio": event.correction_ratio,
            "cosine": event.cosine,
            "active": float(event.corrected),
            **next(iter(each.values())),
        }
        return row if len(each) == 1 else {**row, "constraints": each}

    def state_dict(self) -> dict[str, Any]:
        """Filter memory and estimators."""
        return {
            "filter": self._filter.state_dict(),
            "steering": {name: s.state_dict() for name, s in self._steering.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._filter.load_state_dict(state["filter"])
        for name, steering in self._steering.items():
            steering.load_state_dict(state["steering"][name])
