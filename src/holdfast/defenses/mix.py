"""Mix: replay of safe data beside the task.

Paper: the practice of Bianchi et al., *Safety-Tuned LLaMAs: Lessons From Improving the Safety of Large Language Models
that Follow Instructions* (ICLR 2024), who put safe pairs into the fine-tuning data.
Stage: fine-tuning. Passes per step: task forward and backward, safe forward and backward. Side data: safe pairs (the
constraint share of the safety sets; monitor and certify stay held out).

    min_theta  L_task(theta) + lambda L_safe(theta)

with both losses the mean over the scored tokens of their own batch. A step takes the gradient

    g = g_task + lambda g_safe

before clipping; the safe batch has `safety_batch_size` rows, without replacement inside a pass over the safe pairs.

Departures from the practice:
* the safe pairs are a term of their own with a weight, where mixed data leave the balance of each batch to chance and
  to the lengths of the replies;
* the safe pass runs without dropout, so that `weight: 0` changes no bit of the run;
* the logged loss is the task's; `safe_loss` is logged beside it;
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
from holdfast.trainers.side_pass import token_mean_nll


@DEFENSES.register("mix")
@final
class Mix(Defense):
    """Adds the loss of safe pairs."""

    name = "mix"
    stages = ("finetune",)
    summary = "adds the loss of replayed safe pairs"
    passes = "2 forward + backward"
    needs = frozenset({"safety"})
    reference = "Bianchi et al., Safety-Tuned LLaMAs, ICLR 2024"
    off = MappingProxyType({"weight": 0.0})

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings.

        Attributes:
            weight: lambda, weight of the safe pairs' loss.
        """

        weight: float = 1.0

        def __post_init__(self) -> None:
            """Refuse values out of range."""
            if not 0 <= self.weight < math.inf:
                raise ConfigError(
                    f"mix: weight is {self.weight}, expected a number of at least 0",
                    remedy="1 weighs safe and task tokens alike",
                )

    config: Config

    def validate(self, run: TrainingRun) -> None:
        """Trainable weights must be float32."""
        ParameterSpace([p for p in run.model.parameters() if p.requires_grad])

    def attach(self, run: TrainingRun) -> None:
        """No step without its term yet."""
        self._watch = NonfiniteWatch(self.name)

    def on_gradient(self, run: TrainingRun) -> None:
        """Add `lambda g_safe`."""
        safe = run.safe
        rows = [safe[i] for i in run.draw(safe, "mix")]
        losses, gradient = run.side_gradient(rows, token_mean_nll(rows))
        value, weight, space = float(losses.sum()), self.config.weight, run.space()
        self._row: Row = {"safe_loss": value}
        if not weight:  # a gradient of zeros would still move parameters that have none
            return
        if self._watch.accepts(run.step, value, space.dots([(gradient, gradient)])[0]):
            space.add_to_gradient([gradient], [weight])
        else:
            self._row = {"safe_loss": None, "event": str(Event.NONFINITE)}

    def row(self) -> Row:
        """The mean loss of this step's safe tokens, without its weight; None and an event where it was not finite."""
        return self._row

    def state_dict(self) -> dict[str, Any]:
        """Steps without their term."""
        return self._watch.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._watch.load_state_dict(state)
