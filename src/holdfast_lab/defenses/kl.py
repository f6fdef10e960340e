"""KL: an anchor to the first model's distribution on safe data.

Paper: distillation from the model before training, as in Li and Hoiem, *Learning without Forgetting* (ECCV 2016), here
on safe pairs; the penalty of RLHF (Ziegler et al., *Fine-Tuning Language Models from Human Preferences*, 2019) has the
KL the other way round, on the model's own samples.

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
* the logged loss is the task's; `kl` is logged beside it.
The paper, *Beyond Average Safety*, does not have it; there is no preset.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from holdfast.data.encode import Encoded
from holdfast.training.hooks import DEFENSES, TrainingRun
from holdfast.training.side_pass import RowLoss, token_mean_kl
from holdfast_lab.building_blocks.options import Options, option
from holdfast_lab.building_blocks.side_term import SafeTermDefense


@DEFENSES.register("kl")
class KL(SafeTermDefense):
    name = "kl"
    fsdp = True
    summary = "adds the KL divergence from the first model on safe pairs"
    passes = "2 forward + backward, 1 forward"
    needs = frozenset({"safety"})
    reference = "Li and Hoiem, Learning without Forgetting, ECCV 2016"
    figure = "kl"
    off = MappingProxyType({"weight": 0.0})

    @dataclass(frozen=True, kw_only=True)
    class Config(Options):
        weight: float = option(
            1.0, "lambda, weight of the mean divergence per token.", least=0,
            remedy="1 weighs a nat of divergence as a nat of task loss",
        )  # fmt: skip

    config: Config

    def initialise(self, run: TrainingRun) -> None:
        """Keep theta_0, where no fresh adapter can be switched off."""
        run.theta_0.keep()

    def loss(self, run: TrainingRun, rows: Sequence[Encoded]) -> RowLoss:
        return token_mean_kl(rows, run.theta_0.active)
