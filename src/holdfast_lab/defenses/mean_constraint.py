"""Mean constraint: the average degradation of the safety set is kept below a bound.

Paper: *Beyond Average Safety: Chance-Constrained LLM Fine-tuning*, equation (4), the baseline that the chance
constraint is set against.

    min_theta  L_SFT(theta)    subject to    mean_i D_i(theta) <= epsilon

D_i is the degradation of safety example i since fine-tuning began, in the unit of the run's constraint. The paper gives
no algorithm for it, so it is enforced by the filter that enforces ours, and the two differ in the constraint alone: an
applied step s satisfies

    h . s <= -gamma (mean_i D_i - epsilon),    h = grad mean_i D_i

(see `holdfast` for the spaces, the metric and the estimators). The gradient of the mean does not tell one example from
another, so a few may be lost where many pay for it (Proposition 2.1). epsilon is the constraint's tau unless given: the
average example may then lose what under the chance constraint no more than a share alpha may exceed.

Majorizer, beta, alpha and buffer of the run's constraint do not enter; violation rates are still counted at its tau.
`g` in the event log is `mean_i D_i - epsilon`, averaged over steps like holdfast's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from holdfast.core.errors import ConfigError
from holdfast.defenses.holdfast import FilteredDefense, Holdfast
from holdfast.training.hooks import DEFENSES, Row
from holdfast.training.safety import SafetySet
from holdfast.training.side_pass import weighted
from holdfast.training.steering import Steering


class MeanSteering(Steering):
    """The running estimate of `mean_i D_i - epsilon`, with `reserve epsilon` as margin."""

    def __init__(self, safety: SafetySet, config: MeanConstraint.Config) -> None:
        super().__init__(safety, config)
        self.limit = safety.constraint.tau if config.epsilon is None else config.epsilon
        self.buffer, self.margin = 0.0, config.reserve * self.limit
        self.entropic = False

    feasible_start = True  # every D is 0 there, and epsilon is not negative

    def terms(self, degradations: Tensor) -> Tensor:
        return degradations

    def start(self) -> float:
        return 0.0

    def figures(self, degradations: Tensor, weights: Tensor | None = None) -> Row:
        """The mean on this batch, beside the figures of its tail."""
        mean = float(weighted(degradations, weights).mean())
        return {**super().figures(degradations, weights), "mean_degradation": mean}


@DEFENSES.register("mean_constraint")
class MeanConstraint(FilteredDefense):
    name = "mean_constraint"
    fsdp = True
    summary = "average degradation bounded at every step by the same filter (equation 4)"
    passes = "2 forward + backward"
    needs = frozenset({"safety"})
    unit = "nll_token"  # the paper's degradation is that of the log-likelihood
    reference = "Beyond Average Safety, equation (4)"

    @dataclass(frozen=True, kw_only=True)
    class Config(Holdfast.Config):
        """Those of `holdfast`, and the bound.

        Attributes:
            epsilon: the largest acceptable mean degradation, in nats of the constraint's unit; None: its tau.
        """

        epsilon: float | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.epsilon is not None and not 0 <= self.epsilon < math.inf:
                raise ConfigError(
                    f"mean_constraint: epsilon is {self.epsilon}, expected a number from 0: the unchanged model has 0",
                    remedy="set a positive epsilon, or leave it out for the constraint's tau",
                )

    config: Config

    def steer(self, safety: SafetySet) -> Steering:
        return MeanSteering(safety, self.config)
