"""The chance constraint, enforced at every optimizer step by a safety filter.

Constraint k of K speaks of a safety set with degradations D_i:  g_k = mean_i phi(D_i - tau) - alpha <= 0.  A step is

    draw       a batch of each safety set, by seed and step
    measure    D_i and grad g_k at theta, and the task's gradient               (`training.step`)
    estimate   g_k by a running average, since a batch cannot express a rate    (`training.steering`)
    filter     the smallest change of the optimizer's step s with               (`constraint.filter`)
               grad_g_k . s <= -gamma (g_k + rho)  for every k

Reference: *Beyond Average Safety: Chance-Constrained LLM Fine-tuning*, equations (6)-(12) and Algorithm 1.
Stage: fine-tuning. Passes per step: task forward and backward, safety forward and backward. Side data: safety pairs.

Differs from the paper's text, each by a setting that restores it (`preset: paper`):
* `space="update"` corrects the step the optimizer takes, since AdamW does not keep the inequality that the filtered
  gradient satisfies; `space="gradient"` is Algorithm 1.
* `estimator="ema"` averages value and gradient over steps, since ten examples cannot express a rate of 5 %; `"batch"`
  does not.
* `rate=0.3`, the share of the slack one step may use; the paper's kappa = 1 / learning rate is `rate=1`.
* A run that names no unit steers by KL (`kl_token`, own refusals `kl_first`); the paper's unit is `nll_sum`.
docs/log.md has the experiment behind these.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

from torch import Tensor

from holdfast.constraint.event import Event
from holdfast.constraint.filter import SafetyFilter
from holdfast.constraint.filter_input import FilterOptions
from holdfast.defaults import LATER_OPTIONS
from holdfast.training.hooks import DEFENSES, Defense, Inputs, Items, Row, TrainingRun
from holdfast.training.safety import SafetySet
from holdfast.training.side_pass import Term
from holdfast.training.steering import Steering, choose_rows, looks_first, one_row, verifier
from holdfast.training.support import require_float32


class FilteredDefense(Defense):
    """Training whose every step a `SafetyFilter` corrects; its config is a `FilterOptions`."""

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
            run.optimizer, rate=c.rate, space=c.space, metric=c.metric, trust_region=c.trust_region,
            gradient_decay=c.gradient_decay, dual=c.dual, anchor=c.anchor, verified=c.verify > 0,
        )  # fmt: skip
        self._steering = {name: self.steer(safety) for name, safety in run.data.safety.items()}
        self._infeasible_start = [n for n, s in self._steering.items() if not s.feasible_start]
        self._inactive = 0.0

    def micro_step(self, run: TrainingRun, inputs: Inputs, items: Items) -> Tensor:
        """The task's gradient, and in a fused step every constraint's with it."""
        terms = self._terms(run)
        if run.progress.micro == 0:
            choose_rows(run, {name: self._steering[name] for name in terms})
        return run.engine.accumulate(inputs, items, terms, skip=looks_first(run.args, self._inactive))

    def _terms(self, run: TrainingRun) -> dict[str, Term]:
        """Of the constraints that this step measures: all, or those that are due (`every`, `rest`)."""
        step, anchor = run.progress.step, self._filter.anchor
        return {name: s.terms for k, (name, s) in enumerate(self._steering.items()) if s.due(step, k, anchor)}

    def on_gradient(self, run: TrainingRun) -> None:
        """Measure every constraint at theta, estimate it, and arm the filter, which corrects the step that follows."""
        anchor, followed = self._filter.anchor, self._steering
        self._first, verify = run.progress.step == 0, verifier(run, followed, anchor, self.config.verify)
        measured = run.engine.measure(self._terms(run))
        values: dict[str, float | None] = dict.fromkeys(followed)
        estimates = {n: s.predict(anchor) for n, s in followed.items() if n not in measured and anchor is not None}
        for name, one in measured.items():
            weights = run.data.safety_weights(name)
            values[name], estimates[name] = followed[name].estimate(one, anchor, weights)
        gradients = [measured[name].gradient if name in measured else None for name in followed]
        if measured:
            self._inactive += 0.1 * (min(followed[name].inactive for name in measured) - self._inactive)
        limits = [s.limit_of_steps() for s in followed.values()]
        self._filter.arm(list(values.values()), gradients, [estimates[name] for name in followed], limits, verify)

    def skip_step(self, run: TrainingRun) -> None:
        """Let the optimizer's empty step pass; nothing is measured or remembered."""
        self._filter.skip()

    def row(self) -> Row:
        """The filter's event and the constraints' figures."""
        event = self._filter.last_event
        if event is None:
            return {}
        parts = zip(self._steering.items(), event.values, event.multipliers, strict=True)
        each = {name: {**followed.row, "value": v, "multiplier": mu} for (name, followed), v, mu in parts}
        name = Event.INFEASIBLE_START if self._first and self._infeasible_start else event.name
        common = {
            "event": str(name), "residual": event.residual, "correction_ratio": event.correction_ratio,
            "cosine": event.cosine, "active": float(event.corrected), "pulled": event.pulled,
        }  # fmt: skip
        return one_row(common | ({"nonfinite": event.nonfinite} if event.nonfinite else {}), each)

    def describe(self) -> dict[str, object]:
        """Name and settings, without options that are off and that earlier versions lack: their checkpoints fit."""
        return {key: value for key, value in super().describe().items() if (key, value) not in LATER_OPTIONS.items()}

    def state_dict(self) -> dict[str, object]:
        """Filter memory and estimators."""
        steering = {name: s.state_dict() for name, s in self._steering.items()}
        return {"filter": self._filter.state_dict(), "inactive": self._inactive, "steering": steering}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._filter.load_state_dict(state["filter"])
        self._inactive = float(state.get("inactive", 0.0))  # not in checkpoints of earlier versions
        for name, steering in self._steering.items():
            steering.load_state_dict(state["steering"][name])


@DEFENSES.register("holdfast")
@final
class Holdfast(FilteredDefense):
    """Chance-constrained fine-tuning."""

    name = "holdfast"
    stages = ("finetune",)
    summary = "chance constraint enforced at every step by a closed-form filter (ours)"
    passes = "2 forward + backward"
    needs = frozenset({"safety"})
    reference = "Beyond Average Safety: Chance-Constrained LLM Fine-tuning"
    fsdp = deepspeed = True
    constrains = True
    paper = MappingProxyType({"space": "gradient", "rate": 1.0, "estimator": "batch"})

    @dataclass(frozen=True, kw_only=True)
    class Config(FilterOptions):
        """Settings of the filter and of the estimator (`constraint.filter_input`)."""

    config: Config
