"""Mix: replay of safe data beside the task.

Paper: the practice of Bianchi et al., *Safety-Tuned LLaMAs: Lessons From Improving the Safety of Large Language Models
that Follow Instructions* (ICLR 2024), who put safe pairs into the fine-tuning data.

    min_theta  L_task(theta) + lambda L_safe(theta)

with both losses the mean over the scored tokens of their own batch. A step takes the gradient

    g = g_task + lambda g_safe

before clipping; the safe batch has `safety_batch_size` rows, without replacement inside a pass over the safe pairs.

Departures from the practice:
* the safe pairs are a term of their own with a weight, where mixed data leave the balance of each batch to chance and
  to the lengths of the replies;
* the safe pass runs without dropout, so that `weight: 0` changes no bit of the run;
* the logged loss is the task's; `safe_loss` is logged beside it.
The paper, *Beyond Average Safety*, does not have it; there is no preset.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from holdfast.data.encode import Encoded
from holdfast.training.hooks import DEFENSES, TrainingRun
from holdfast.training.side_pass import RowLoss, token_mean_nll
from holdfast_lab.building_blocks.options import Options, option
from holdfast_lab.building_blocks.side_term import SafeTermDefense


@DEFENSES.register("mix")
class Mix(SafeTermDefense):
    name = "mix"
    fsdp = True
    summary = "adds the loss of replayed safe pairs"
    passes = "2 forward + backward"
    needs = frozenset({"safety"})
    reference = "Bianchi et al., Safety-Tuned LLaMAs, ICLR 2024"
    figure = "safe_loss"
    off = MappingProxyType({"weight": 0.0})

    @dataclass(frozen=True, kw_only=True)
    class Config(Options):
        weight: float = option(
            1.0, "lambda, weight of the safe pairs' loss.", least=0, remedy="1 weighs safe and task tokens alike"
        )

    config: Config

    def loss(self, run: TrainingRun, rows: Sequence[Encoded]) -> RowLoss:
        return token_mean_nll(rows)
