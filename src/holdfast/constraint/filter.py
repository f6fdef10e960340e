"""The safety filter: the optimizer's step, corrected as little as possible so that the constraint's barrier holds.

With values `v_k = g_k + rho_k`, gradients `h_k = grad g_k` and a rate gamma in (0, 1], an applied step `s` must satisfy

    h_k . s <= -gamma v_k          for every constraint k.

* `update` space corrects the step the optimizer really took, `s_nom = theta_after - theta_before`:
  `s = s_nom - M H^T mu`, mu the solution of the K x K dual (one constraint: `max(0, h.s_nom + gamma v) / h.M h`),
  followed by a trust region `norm(correction) <= c max(norm(s_nom), its average, floor)`. The optimizer's moments never
  see the correction. With `dual`, the h_k enter the optimizer's gradient as well (`constraint.memory.DualTerm`); with
  `anchor`, steps that lead too far from theta_0 are pulled back (`constraint.anchor`).
* `gradient` space is the paper's Algorithm 1: `grad = grad_f + lambda h` with `kappa = gamma / lr`, handed to the
  optimizer. With any optimizer but plain SGD the applied step does not satisfy the inequality.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.constraint import filter_input as inputs
from holdfast.constraint.anchor import Anchor, Limit, Verify
from holdfast.constraint.event import Event, FilterEvent
from holdfast.constraint.gradients import ParameterSpace, Vector, trainable
from holdfast.constraint.memory import FilterMemory
from holdfast.constraint.metric import adam_diagonal, resolve_metric
from holdfast.constraint.problem import FilterProblem, measure
from holdfast.core.errors import ConfigError
from holdfast.defaults import default

TRUST_FLOOR = 1e-4  # of norm(theta): lets a correction through while a warm-up holds the learning rate at zero


@dataclass
class _Armed:
    """A constraint measured at theta, waiting for the optimizer's step."""

    values: list[float]
    gradients: list[Vector]  # joined, as `before` is
    limits: Sequence[Limit] = ()
    at_distance: Sequence[float] = ()  # the values by the distance from theta_0 alone, which the anchor goes by
    before: Vector | None = None
    nonfinite: str = ""  # what was not finite; the step is then discarded
    lost: Tensor | None = None  # 1 where the task's gradient was not, and the optimizer's kernels did nothing
    distance: float | None = None  # from theta_0, after a step that was not corrected
    verify: Verify | None = None
    skipped: bool = False


class SafetyFilter:
    """Filters every step of an optimizer.

    In a plain PyTorch loop::

        filt = SafetyFilter(optimizer, rate=0.3)
        task_loss.backward()
        event = filt.step(g)  # g: a differentiable scalar, positive when violated, or a list of them
        optimizer.zero_grad()

    Args:
        optimizer: any torch optimizer whose trainable parameters are float32 or float64. Its `step` is filtered
            from now on; `detach()` undoes that.
        rate: gamma, the share of the violation (or of the slack) that one step may undo (or use).
        space: `update` or `gradient`.
        metric: `identity`, `adam`, `adam_unit`, or `auto` (`adam` where the optimizer has second moments); update
            space only.
        trust_region: c, the largest correction in multiples of the nominal step; update space only.
        gradient_decay: average of the constraint's gradients over steps; 0 uses each step's own.
        dual: how fast the optimizer's own gradient takes over from the corrections; 0 not at all.
        anchor: pull steps back towards theta_0, the parameters of the first step; update space only.
        verified: pull back those steps that `verify` of `arm` finds too far out, also without an anchor.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rate: float = default("defense.rate"),
        space: inputs.Space = default("defense.space"),
        *,
        metric: str = default("defense.metric"),
        trust_region: float = default("defense.trust_region"),
        gradient_decay: float = 0.0,
        dual: float = 0.0,
        anchor: bool = False,
        verified: bool = False,
    ) -> None:
        inputs.check_settings(rate, space, metric, trust_region, gradient_decay, dual, anchor=anchor or verified)
        self.optimizer: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        inputs.require_one_step(self.optimizer)
        self.rate, self.space, self.trust_region = rate, space, trust_region
        self.metric = resolve_metric(metric, self.optimizer) if space == "update" else "identity"
        self.gradient_decay, self.dual = gradient_decay, dual
        self._known = ParameterSpace(trainable(self.optimizer))  # refuses unsupported parameters now
        self._memory = FilterMemory(anchor=Anchor(pulls=anchor) if anchor or verified else None)
        self._armed: _Armed | None = None
        self.last_event: FilterEvent | None = None
        self._handles = [self.optimizer.register_step_pre_hook(self._before_step)]
        self._handles += [self.optimizer.register_step_post_hook(self._after_step)]

    def detach(self) -> None:
        """Stop filtering: the optimizer is as it was."""
        for handle in self._handles:
            handle.remove()
        inputs.clear_flag(self.optimizer)

    def step(self, g: Tensor | Sequence[Tensor]) -> FilterEvent:
        """Differentiate the constraint(s) at theta, take the optimizer's step, correct it."""
        self.arm(*inputs.measured_constraints(g, trainable(self.optimizer)))
        self.optimizer.step()
        assert self.last_event is not None
        return self.last_event

    @property
    def anchor(self) -> Anchor | None:
        """theta_0 and the distance from it, where steps are pulled back or verified."""
        return self._memory.anchor

    def _space(self) -> ParameterSpace:
        """Made anew where parameter objects or their storage have been exchanged."""
        self._known = ParameterSpace.of(trainable(self.optimizer), self._known)
        return self._known

    def arm(
        self, values: Sequence[float | None], gradients: Sequence[Vector | None],
        estimates: Sequence[float] | None = None, limits: Sequence[Limit] = (), verify: Verify | None = None,
    ) -> None:  # fmt: skip
        """Announce the constraints, measured at the current parameters, for the next optimizer step.

        Args:
            values: `g_k + rho_k` on this step's safety batch; None where this step does not measure it.
            gradients: `h_k` on this batch by parameter, reduced over ranks; where None, the average stands for it.
            estimates: values averaged over steps, used instead of `values` where given; of a constraint that is not
                measured, as its distance from theta_0 predicts it.
            limits, verify: of restoring and of an anchor (`constraint.anchor`), whose ceilings are 0 unless given.
        """
        space, memory, measured = self._space(), self._memory, [h is not None for h in gradients]
        batch = [0.0 if v is None else v for v in values]
        known = batch if estimates is None else list(estimates)
        joined = [None if h is None else space.join(h) for h in gradients]
        vectors = [memory.stand_in(k, self.gradient_decay) if h is None else h for k, h in enumerate(joined)]
        self._armed = armed = _Armed(memory.relieved(known, measured), vectors, limits, verify=verify)
        armed.at_distance = () if all(measured) else known
        norms, task = memory.dual_term.lengths(space, vectors, measured)
        bad = inputs.nonfinite("value", zip(batch, armed.values, strict=True))
        armed.nonfinite = bad or inputs.nonfinite("gradient", zip(norms, strict=True))
        if armed.nonfinite:
            return
        memory.fold_moment(joined, norms, self.metric)
        if self.dual > 0.0:
            memory.dual_term.add(space, vectors, memory.dual_term.fold_norms(norms, measured), task)
        if self.anchor is not None:
            armed.limits = self.anchor.drop(space, armed.values, limits)
        if self.gradient_decay > 0.0:
            armed.gradients = memory.fold_gradients(joined, self.gradient_decay)
        if self.space == "gradient":
            self._filter_gradient(space, armed)

    def skip(self) -> None:
        """Discard the next optimizer step: parameters, moments and the filter's memory stay as they are."""
        self._armed = _Armed([], [], skipped=True)

    def _filter_gradient(self, space: ParameterSpace, armed: _Armed) -> None:
        """Algorithm 1."""
        lr = inputs.one_learning_rate(self.optimizer)
        if lr == 0.0:  # no step, no filter
            self._report(Event.INACTIVE, armed, np.zeros(len(armed.values)))
            return
        nominal = list(torch._foreach_neg(space.join(space.task_gradient())))
        problem, _ = measure(space, armed.gradients, armed.values, nominal, rate=self.rate / lr)  # kappa
        if not problem.finite:
            armed.nonfinite = "correction"
            return
        mu = problem.multipliers()
        if not np.isfinite(mu).all():
            space.drop_gradient()
            self._report(Event.INFEASIBLE, armed, mu)
        elif not mu.any():
            self._report(Event.INACTIVE, armed, mu, problem)
        else:
            space.add_to_gradient([space.split(h) for h in armed.gradients], mu.tolist())
            self._report(Event.ACTIVE, armed, mu, problem)

    def _before_step(self, *_: object) -> None:
        armed, space = self._armed, self._space()
        if armed is None:
            raise ConfigError(
                "optimizer.step() was called without a constraint: this step would not be filtered",
                remedy="call filt.step(g) instead, or filt.detach() to stop filtering",
            )
        if armed.skipped:
            space.drop_gradient()
            return
        lost = space.nonfinite(space.task_gradient())
        if self.space == "update" and inputs.set_flag(self.optimizer, space, lost):
            armed.lost = lost
        elif lost.item():
            armed.nonfinite = "task gradient"
        if armed.nonfinite:
            space.drop_gradient()  # the optimizer then touches neither parameters nor moments
        if armed.nonfinite or self.space == "update":
            armed.before = space.theta()

    def _after_step(self, *_: object) -> None:
        armed, self._armed = self._armed, None
        assert armed is not None
        inputs.clear_flag(self.optimizer)
        if armed.skipped:
            return
        space = self._space()
        if armed.nonfinite:
            self._discard(space, armed)
        elif self.space == "update":
            self._correct(space, armed)
            if self.anchor is not None and self.last_event is not None and not armed.nonfinite:
                known = armed.at_distance or armed.values
                share = self.anchor.pull(space, known, armed.limits, self.rate, armed.distance, armed.verify)
                self.last_event = replace(self.last_event, pulled=share)
                if self.anchor.unverified == 0:  # it was measured after the correction
                    self._memory.relief = []

    def _correct(self, space: ParameterSpace, armed: _Armed) -> None:
        assert armed.before is not None
        now = space.theta()
        problem, directions = measure(
            space, armed.gradients, armed.values, list(torch._foreach_sub(now, armed.before)), rate=self.rate,
            metric=lambda: self._diagonal(space), away=None if self.anchor is None else self.anchor.away(now),
        )  # fmt: skip
        if armed.lost is not None and armed.lost.item():  # no wait: the problem's numbers came after it
            armed.nonfinite = "task gradient"
        elif not problem.finite:
            armed.nonfinite = "correction"
        if armed.nonfinite:
            self._discard(space, armed)
            return
        self._memory.fold_norm(problem.nominal_norm)
        if self.dual > 0.0:
            self._memory.dual_term.follow(problem, self.dual)
        mu = problem.multipliers()
        if not mu.any():
            armed.distance = problem.distance
            self._report(Event.INACTIVE, armed, mu, problem)
            return
        if not np.isfinite(mu).all():
            space.put(armed.before)
            self._report(Event.INFEASIBLE, armed, mu)
            return
        floor = TRUST_FLOOR * math.sqrt(space.dots([(armed.before, armed.before)])[0])
        radius = self.trust_region * max(problem.nominal_norm, self._memory.nominal_norm, floor)
        name, scale = Event.ACTIVE, min(1.0, radius / problem.correction_norm(mu))
        if scale < 1.0:
            name = Event.CAPPED
            if max(armed.values) > 0.0:  # infeasible, and the trust region leaves the barrier unmet: only restore
                name, problem = Event.RESTORATION, problem.without_nominal()
                space.put(armed.before)
                mu = problem.multipliers()
                if not np.isfinite(mu).all():  # the constraints contradict each other
                    self._report(Event.INFEASIBLE, armed, mu)
                    return
                scale = min(1.0, radius / problem.correction_norm(mu))
        mu = mu * scale
        for multiplier, direction in zip(mu.tolist(), directions, strict=True):
            if multiplier != 0.0:
                space.move(direction, -multiplier)
        self._report(name, armed, mu, problem)

    def _diagonal(self, space: ParameterSpace) -> Vector | None:
        """Of M; None for the identity, which also holds while no constraint has had a gradient."""
        moment = self._memory.debiased_moment() if self.metric != "identity" else None
        unit = self.metric == "adam_unit"
        return None if moment is None else adam_diagonal(space, self.optimizer, moment, unit=unit)

    def _discard(self, space: ParameterSpace, armed: _Armed) -> None:
        """Undo a step in which something was not finite, and stop when that happens too often."""
        assert armed.before is not None
        space.put(armed.before)
        self._report(Event.NONFINITE, armed, np.zeros(len(armed.values)))
        self._memory.count_nonfinite(armed.nonfinite)

    def _report(self, name: Event, armed: _Armed, mu: np.ndarray, problem: FilterProblem | None = None) -> None:
        """Note what was done; `problem`: what `mu` solves, where it is finite."""
        event = FilterEvent(name, tuple(armed.values), tuple(mu.tolist()), nonfinite=armed.nonfinite)
        if problem is not None:
            self._memory.relieve(problem.taken(mu))
            ratio = problem.correction_ratio(mu)
            event = replace(event, residual=problem.residual(mu), correction_ratio=ratio, cosine=problem.cosine)
        self.last_event = event
        self._memory.watch_restoration(name, armed.values, armed.limits, armed.at_distance)

    def state_dict(self) -> dict[str, object]:
        """Everything a resumed run needs, with shards gathered (a collective call)."""
        return self._memory.state_dict(self._space())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._memory = FilterMemory.from_state(state, self._space(), own=self.anchor)
