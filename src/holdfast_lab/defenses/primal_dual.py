"""Primal-dual: the chance constraint as a term whose multiplier rises while it is violated.

Paper: Entesari et al., *Constrained Entropic Unlearning: A Primal-Dual Framework for Large Language Models*
(arXiv:2506.05314, 2025), as *Beyond Average Safety* applies it in its appendix "Primal-Dual Algorithm".

    min_theta max_{mu >= 0}  L_SFT(theta) + mu (c(theta) - alpha + rho),      c = mean_i phi(D_i - tau)

One step, with the task batch and safety batch of that step:

    loss = L_SFT + mu c,    one optimizer step,
    mu  <- clip(mu + eta (c - alpha + rho), 0, cap)      with the c of that loss; not in the first warm-up epochs

Each safety set has a multiplier. Nothing is promised before mu has settled: unlike `holdfast`, the iterates on the way
may leave the feasible set.

Departures from the authors' code:
* mu moves once per optimizer step; there it moves with every evaluation of the loss, micro-batches and validation too;
* c is that of all processes, so that they keep one mu; there every process has its own;
* mu is part of the checkpoint;
* `cap` bounds mu, which grows without end where the constraint cannot be met; reaching it is logged;
* start and dual rate are 1 and 0.1. Theirs (50 to 100, and 1 to 5, after 3 to 5 epochs of warm-up) are made for an
  unlearning loss that is quadratic in the logits; here c is a number near alpha.
*Beyond Average Safety* states no constant of its runs, so `preset: paper` changes nothing.

A fused step (`step: fused`, on a GPU by itself) finds both gradients in one pass, as for `holdfast`. In two passes the
activations of the task's last micro-batch and of the process's whole share of the safety batch exist at the same time,
whatever `safety_micro_batch_size` is. `single_backward=False` gives the same gradient by a second backward, in
micro-batches; it is also what happens where a shared one would be wrong (see `may_share_backward`). The cvar
majorizer's threshold follows the degradations as in `holdfast`.
A gradient of one backward for all terms that is not finite voids the step, and a fused one always is that. mu then
stays, as it does where a term is left out.
"""

import logging
import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.constraint.event import Event
from holdfast.core.errors import ConfigError
from holdfast.core.ranks import gather_rows
from holdfast.training.hooks import DEFENSES, Inputs, Items, Row, TrainingRun, two_pass_only
from holdfast.training.safety import SafetySet
from holdfast.training.side_pass import may_share_backward
from holdfast.training.steering import MovingConstraint, batch_figures
from holdfast_lab.building_blocks.options import Options, option
from holdfast_lab.building_blocks.side_term import SideTermDefense, row_of_sets

logger = logging.getLogger(__name__)

OURS = "leave it out"  # the defaults are not the authors'


def dual_step(mu: float, excess: float, rate: float, cap: float) -> float:
    """`clip(mu + rate excess, 0, cap)`: projected gradient ascent on the multiplier; excess > 0 is a violation."""
    return min(max(mu + rate * excess, 0.0), cap)


class _Dual:
    def __init__(self, safety: SafetySet, start: float) -> None:
        self.name, self.mu = safety.name, start
        self.moving = MovingConstraint(safety)
        self.row: Row = {}

    def look(self, degradations: Tensor) -> bool:
        c = self.moving.now
        self.degradations = degradations.detach().double().cpu()
        excess = float(c.phi(self.degradations).mean()) - c.alpha + c.buffer
        self.excess = excess if math.isfinite(excess) else None
        self.row = {**batch_figures(c, self.degradations), "value": self.excess, "multiplier": self.mu}
        self.event = Event.NONFINITE if self.excess is None else Event.ACTIVE if self.mu else Event.INACTIVE
        return self.event is Event.ACTIVE

    def void(self) -> None:
        """The gradient was not finite: the multiplier does not move by this batch."""
        self.excess, self.event = None, Event.NONFINITE

    def ascend(self, positions: list[int], rate: float, cap: float) -> None:
        if self.excess is None:
            return
        if rate > 0 and self.mu + rate * self.excess > cap:
            if self.mu < cap:
                logger.warning(
                    "primal_dual: the multiplier of %r reached its cap of %g; the constraint may not be attainable",
                    self.name, cap,
                )  # fmt: skip
            self.event = Event.CAPPED
        self.mu = dual_step(self.mu, self.excess, rate, cap)
        self.moving.follow(torch.tensor(positions), self.degradations)


@DEFENSES.register("primal_dual")
class PrimalDual(SideTermDefense):
    name = "primal_dual"
    fsdp = True
    summary = "chance constraint as a loss term whose multiplier rises while it is violated"
    passes = "2 forward + 1 backward"
    needs = frozenset({"safety"})
    reference = "Entesari et al., Constrained Entropic Unlearning, arXiv:2506.05314, 2025"
    off = MappingProxyType({"start": 0.0, "dual_rate": 0.0})
    constrains = True
    packs = True
    joint_terms = True

    @dataclass(frozen=True, kw_only=True)
    class Config(Options):
        start: float = option(1.0, "mu before the first update.", least=0, remedy=OURS)
        dual_rate: float = option(
            0.1, "eta, by how much one unit of violation raises mu in one step.", least=0, remedy=OURS
        )
        warmup_epochs: float = option(
            0.0, "passes over the task data, with fractions, in which mu stays at its start.", least=0, remedy=OURS
        )
        cap: float = option(100.0, "the largest mu.", above=0, remedy=OURS)
        single_backward: bool = option(True, "one backward for both terms; False: two, of less memory.")

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.cap < self.start:
                what = f"primal_dual: cap is {self.cap:g}, expected a number not below start ({self.start:g})"
                raise ConfigError(what, remedy="raise cap, or lower start")

    config: Config

    def attach(self, run: TrainingRun) -> None:
        super().attach(run)
        self._duals = {name: _Dual(safety, self.config.start) for name, safety in run.data.safety.items()}
        self._added: Tensor | None = None
        if self.config.single_backward and not may_share_backward(run.model, run.args):
            logger.info(
                "primal_dual: two backward passes a step instead of one: gradient checkpointing runs the safety rows "
                "again in the backward, when dropout is on (or, re-entrant under DDP, reaches parameters twice)"
            )

    def _one_backward(self, run: TrainingRun) -> bool:
        return self.config.single_backward and not run.engine.fused and may_share_backward(run.model, run.args)

    def micro_step(self, run: TrainingRun, inputs: Inputs, items: Items) -> Tensor:
        """The usual gradient, in a fused step also each term's; the loss reported is the task's, as elsewhere."""
        self._added = None
        loss = run.engine.accumulate(inputs, items, {name: dual.moving.now.phi for name, dual in self._duals.items()})
        return loss if self._added is None else loss - self._added.to(loss)

    @two_pass_only
    def extra_loss(self, run: TrainingRun, model: nn.Module, inputs: Inputs) -> Tensor | None:
        """`mu c` of this process's safety rows, once per optimizer step; data parallelism averages over processes."""
        if not (self._one_backward(run) and run.progress.last_micro_batch):
            return None
        terms = []
        for name, dual in self._duals.items():
            with torch.set_grad_enabled(dual.mu > 0):
                own = run.engine.degradations(name)
            if dual.look(gather_rows(own.detach())):
                terms.append(dual.mu * dual.moving.now.phi(own).mean())
        if not terms:
            return None
        total = torch.stack(terms).sum()
        self._added = total.detach()
        return total

    def on_gradient(self, run: TrainingRun) -> None:
        """Add the terms where the backward was the task's alone, then move the multipliers."""
        if not self._one_backward(run):
            for name, dual in self._duals.items():
                self._add_term(run, name, dual)
        if run.engine.fused or self._added is not None:
            self._require_finite_gradient(run)
        warm = run.progress.epoch >= self.config.warmup_epochs
        for name, dual in self._duals.items():
            dual.ascend(run.data.safety_batch(name), self.config.dual_rate if warm else 0.0, self.config.cap)
        if any(dual.event is Event.NONFINITE for dual in self._duals.values()):
            self._watch.left_out(run.progress.step)

    def _require_finite_gradient(self, run: TrainingRun) -> None:
        """Skip the step where what one backward gave is not finite: one row then spoils the sums of all.

        Terms cannot be told apart any more; in a fused step such a row is in the task's gradient too.
        """
        space = run.space()
        gradient = space.task_gradient()
        if not math.isfinite(space.dots([(gradient, gradient)])[0]):
            space.drop_gradient()
            for dual in self._duals.values():
                dual.void()

    def _add_term(self, run: TrainingRun, name: str, dual: _Dual) -> None:
        """`grad += mu grad c`, from the fused step or by a backward of its own."""
        if dual.mu == 0.0 and not run.engine.fused:
            with torch.no_grad():
                dual.look(gather_rows(run.engine.degradations(name)))
            return
        measured = run.engine.measure({name: dual.moving.now.phi})[name]
        space = run.space()
        finite = math.isfinite(space.dots([(measured.gradient, measured.gradient)])[0])
        if dual.look(measured.degradations) and finite:
            space.add_to_gradient([measured.gradient], [dual.mu])
        elif not finite:
            dual.void()

    def row(self) -> Row:
        """The multipliers of this step's loss, and the constraints' figures on its safety batch."""
        rows = {name: dual.row and {**dual.row, "event": dual.event} for name, dual in self._duals.items()}
        return row_of_sets(rows)

    def state_dict(self) -> dict[str, object]:
        duals = {name: {"mu": dual.mu, **dual.moving.state_dict()} for name, dual in self._duals.items()}
        return {"duals": duals, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, dual in self._duals.items():
            dual.mu = float(state["duals"][name]["mu"])
            dual.moving.load_state_dict(state["duals"][name])
        super().load_state_dict(state)
