"""Penalty: the safety set's average degradation added to the task loss with a fixed weight.

Paper: *Beyond Average Safety: Chance-Constrained LLM Fine-tuning*, below equation (4), which names it as the usual
alternative to the mean constraint.

    min_theta  L_SFT(theta) + w mean_i t(D_i(theta)),      t(D) = D  or  phi(D - tau)

D_i is the degradation of safety example i since fine-tuning began, in the unit of the run's constraint; phi is its
majorizer. With t(D) = D in an NLL unit the penalty is the loss on the safety pairs themselves, up to a constant, and in
`kl_token` an anchor to the model that entered fine-tuning. Every step takes

    g = grad L_SFT + w grad mean_i t(D_i)

No bound is promised: which degradation a weight w leads to is found by trying. `term="majorizer"` is `primal_dual` with
a multiplier that never moves.

The safety rows have a pass of their own, in micro-batches and without dropout. The paper states no weight and reports
no figures for it; 1 is ours. The cvar majorizer's threshold follows the degradations as in `holdfast`.
"""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from holdfast.constraint.event import Event
from holdfast.constraint.gradients import Vector
from holdfast.core.ranks import gather_rows
from holdfast.training.hooks import DEFENSES, Row, TrainingRun
from holdfast.training.steering import MovingConstraint, batch_figures
from holdfast_lab.building_blocks.options import Options, option
from holdfast_lab.building_blocks.side_term import SideTermDefense, row_of_sets

Term = Literal["mean", "majorizer"]


@DEFENSES.register("penalty")
class Penalty(SideTermDefense):
    name = "penalty"
    fsdp = True
    packs = True
    summary = "average degradation as a term of fixed weight in the loss"
    passes = "2 forward + backward"
    needs = frozenset({"safety"})
    unit = "nll_token"  # the paper's degradation is that of the log-likelihood
    reference = "Beyond Average Safety, section 2"
    off = MappingProxyType({"weight": 0.0})

    @dataclass(frozen=True, kw_only=True)
    class Config(Options):
        weight: float = option(1.0, "w, the term's factor beside the task loss.", least=0, remedy="1 is the default")
        term: Term = option(
            "mean", "what is averaged, the degradation (`mean`) or the constraint's majorizer of it (`majorizer`).",
            choices=get_args(Term),
        )  # fmt: skip

    config: Config

    def attach(self, run: TrainingRun) -> None:
        super().attach(run)
        self._moving = {name: MovingConstraint(safety) for name, safety in run.data.safety.items()}
        self._rows: dict[str, Row] = {}

    def on_gradient(self, run: TrainingRun) -> None:
        """Add `w grad mean_i t(D_i)` of every safety set to the gradient of the task."""
        for name, moving in self._moving.items():
            self._rows[name] = self._add(run, name, moving)
        if self.config.weight and any(row["event"] is Event.NONFINITE for row in self._rows.values()):
            self._watch.left_out(run.progress.step)

    def _add(self, run: TrainingRun, name: str, moving: MovingConstraint) -> Row:
        c, weight, space = moving.now, self.config.weight, run.space()

        def term(d: Tensor) -> Tensor:
            return c.phi(d) if self.config.term == "majorizer" else d

        gradients: list[Vector] = []
        if weight > 0.0:
            measured = run.engine.measure({name: term})[name]
            d, gradients = measured.degradations, [measured.gradient]
        else:  # only looked at; a gradient of zeros would still move parameters that have none
            with torch.no_grad():
                d = gather_rows(run.engine.degradations(name)).double().cpu()
        value = float(term(d).mean())
        row = {**batch_figures(c, d), "penalty": value, "event": Event.ACTIVE if weight else Event.INACTIVE}
        if not all(map(math.isfinite, [value, *(space.dots([(g, g)])[0] for g in gradients)])):
            return {**row, "penalty": None, "event": Event.NONFINITE}
        if gradients:
            space.add_to_gradient(gradients, [weight])
        moving.follow(torch.tensor(run.data.safety_batch(name)), d)
        return row

    def row(self) -> Row:
        """The term's value, and the chance constraint's figures on this batch."""
        return row_of_sets(self._rows) if self._rows else {}

    def state_dict(self) -> dict[str, object]:
        moving = {name: moving.state_dict() for name, moving in self._moving.items()}
        return {"constraints": moving, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, moving in self._moving.items():
            moving.load_state_dict(state["constraints"][name])
        super().load_state_dict(state)
