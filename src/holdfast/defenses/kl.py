"""KL: an anchor to the first model's distribution on safe data.

Paper: distillation from the model before training, as in Li and Hoiem, *Learning without Forgetting* (ECCV 2016), here
on safe pairs; the penalty of RLHF (Ziegler et al., *Fine-Tuning Language Models from Human Preferences*, 2019) has the
KL the other way round, on the model's own samples.
Stage: fine-tuning. Passes per step: task forward and backward, safe forward and backward, safe forward at theta_0. Side
data: safe pairs (the constraint share of the safety sets; monitor and certify stay held out).

    min_theta  L_task(theta) + lambda mean_t KL( pi_0(. | prompt, y_<t)  ||  pi_theta(. | prompt, y_<t) )

The mean runs over all completion tokens of this step's safe pairs, in nats; the KL is exact over the vocabulary. A step
takes the gradient

    g = g_task + lambda g_KL

before clipping; g_KL is zero at theta_0. The safe batch has `safety_batch_size` rows, without replacement inside a pass
over the safe pairs. theta_0 is the model with its fresh adapter off; without a fresh adapter (a continued adapter, full
fine-tuning) a copy of its trainable weights is kept.

Departures from Li and Hoiem:
* temperature 1, where they soften both distributions;
* safe pairs, where they have no old data and use the new task's inputs;
* no dropout in these passes, so that the term is zero at theta_0 and `weight: 0` changes no bit of the run;
* the logged loss is the task's; `kl` is logged beside it;
* a term that is not finite is left out of its step (event `nonfinite`); more than 3 in 100 steps end the run.
The paper, *Beyond Average Safety*, does not have it; there is no preset.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

from holdfast.constraint.barrier import Event
from holdfast.constraint.gradients import ParameterSpace
from holdfast.core.errors import ConfigError
from holdfast.trainers.hooks import DEFENSES, Defense, Row, TrainingRun
from holdfast.trainers.nonfinite import NonfiniteWatch
from holdfast.trainers.side_pass import token_mean_kl


@DEFENSES.register("kl")
@final
class KL(Defense):
    """Adds the divergence from theta_0 on safe pairs."""

    name = "kl"
    stages = ("finetune",)
    summary = "adds the KL divergence from the first model on safe pairs"
    passes = "2 forward + backward, 1 forward"
    needs = frozenset({"safety"})
    reference = "Li and Hoiem, Learning without Forgetting, ECCV 2016"
    off = MappingProxyType({"weight": 0.0})

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings.

        Attributes:
            weight: lambda, weight of the mean divergence per token.
        """

        weight: float = 1.0

        def __post_init__(self) -> None:
            """Refuse values out of range."""
            if not 0 <= self.weight < math.inf:
                raise ConfigError(
                    f"kl: weight is {self.weight}, expected a number of at least 0",
                    remedy="1 weighs a nat of divergence as a nat of task loss",
                )

    config: Config

    def validate(self, run: TrainingRun) -> None:
        """Trainable weights must be float32."""
        ParameterSpace([p for p in run.model.parameters() if p.requires_grad])

    def initialise(self, run: TrainingRun) -> None:
        """Keep theta_0, where no fresh adapter can be switched off."""
        run.keep_theta_0()

    def attach(self, run: TrainingRun) -> None:
        """No step without its term yet."""
        self._watch = NonfiniteWatch(self.name)

    def on_gradient(self, run: TrainingRun) -> None:
        """Add `lambda g_KL`."""
        safe = run.safe
        rows = [safe[i] for i in run.draw(safe, "kl")]
        divergences, gradient = run.side_gradient(rows, token_mean_kl(rows, run.at_reference))
        value, weight, space = float(divergences.sum()), self.config.weight, run.space()
        self._row: Row = {"kl": value}
        if not weight:  # a gradient of zeros would still move parameters that have none
            return
        if self._watch.accepts(run.step, value, space.dots([(gradient, gradient)])[0]):
            space.add_to_gradient([gradient], [weight])
        else:
            self._row = {"kl": None, "event": str(Event.NONFINITE)}

    def row(self) -> Row:
        """The mean divergence per safe token, without its weight; None and an event where it was not finite."""
        return self._row

    def state_dict(self) -> dict[str, Any]:
        """Steps without their term."""
        return self._watch.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._watch.load_state_dict(state)
