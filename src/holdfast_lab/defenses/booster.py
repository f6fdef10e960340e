"""Booster: an alignment after which a harmful step gains little.

Paper: Huang et al., *Booster: Tackling Harmful Fine-tuning for Large Language Models via Attenuating Harmful
Perturbation* (ICLR 2025), equation (1) and Algorithm 1.
Fine-tuning is plain afterwards.

    min_theta  L_safe(theta) + lambda [ L_harm(theta) - L_harm(theta - alpha grad L_harm / norm(grad L_harm)) ]

The moved point's dependence on theta is ignored, as the authors do, which gives the gradient

    g = g_safe + lambda (g_harm(theta) - g_harm(theta')),    theta' = theta - alpha g_harm / (norm(g_harm) + 1e-7)

with both harmful gradients on the same batch and one norm over all trainable parameters. The bracket is what a harmful
step of length alpha gains; making it small flattens the harmful loss around the aligned model.

Departures from the authors' code:
* theta is copied and put back, where adding the step again leaves rounding behind;
* gradients of several micro-batches add up, where the code keeps the last one;
* the harmful passes run without dropout, so that both see the same function;
* the harmful batch has the run's batch size, where the code has 10 (`harmful_batch_size`);
* a harmful loss or gradient that is not finite is left out of its step; more than 3 in 100 steps end the run.
The authors go on training the same adapter in fine-tuning (`adapter_policy: continue`) and state that Booster needs it;
the paper merges it first.
"""

from dataclasses import dataclass
from types import MappingProxyType

from holdfast.constraint.gradients import Vector
from holdfast.data.encode import Encoded
from holdfast.training.hooks import DEFENSES, TrainingRun
from holdfast.training.side_pass import token_mean_nll
from holdfast_lab.building_blocks.options import Options, option
from holdfast_lab.building_blocks.side_term import LEFT_OUT, SideTermDefense, harmful_batch, harmful_step


def harmful_drop(run: TrainingRun, rows: list[Encoded], radius: float) -> tuple[float, Vector, Vector]:
    """L_harm, its gradient at theta, and its gradient after a normalised step of length `radius` down it."""
    with harmful_step(run, rows, radius) as (loss, here):
        _, there = run.engine.side_gradient(rows, token_mean_nll(rows))
    return loss, here, there


@DEFENSES.register("booster")
class Booster(SideTermDefense):
    name = "booster"
    fsdp = True
    packs = True
    stages = ("align",)
    summary = "alignment after which a simulated harmful step gains little"
    passes = "3 forward + backward"
    needs = frozenset({"harmful"})
    reference = "Huang et al., Booster, ICLR 2025"
    off = MappingProxyType({"lam": 0.0})
    paper = MappingProxyType({"alpha": 0.1, "lam": 5.0})

    @dataclass(frozen=True, kw_only=True)
    class Config(Options):
        alpha: float = option(
            0.1, "length of the simulated harmful step, in all trainable parameters together.", above=0
        )
        lam: float = option(5.0, "lambda, weight of what that step gains; the authors use 25 for GSM8K.", least=0)
        harmful_batch_size: int | None = option(
            None, "harmful pairs per step, over all processes; None: as many as task rows.", least=1
        )

    config: Config

    def validate(self, run: TrainingRun) -> None:
        super().validate(run)
        harmful_batch(run, self.config.harmful_batch_size)

    def on_gradient(self, run: TrainingRun) -> None:
        """Add `lambda (g_harm(theta) - g_harm(theta'))` to the gradient of the safe pairs."""
        rows = [run.data.harmful[i] for i in harmful_batch(run, self.config.harmful_batch_size)]
        loss, here, there = harmful_drop(run, rows, self.config.alpha)
        space = run.space()
        self._row = {"harmful_loss": loss}
        if not self._watch.accepts(run.progress.step, loss, *space.dots([(here, here), (there, there)])):
            self._row = {"harmful_loss": None, **LEFT_OUT}
        elif self.config.lam:  # a gradient of zeros would still move parameters that have none
            space.add_to_gradient([here, there], [self.config.lam, -self.config.lam])
