"""SafeGrad: the part of the task gradient that works against safety is projected out.

Paper: Yi et al., *Gradient Surgery for Safe LLM Fine-Tuning* (2025), and the authors' code.

    L_a(theta) = mean_t KL( pi_0(. | prompt, y_<t)  ||  pi_theta(. | prompt, y_<t) )

over the completion tokens of this step's safe pairs, exact over the vocabulary; their replies only say which positions
count. With g_u the task gradient, g_a the gradient of L_a, one inner product over all trainable parameters:

    c = <g_u, g_a> / |g_a|^2   where <g_u, g_a> < 0 and |g_a|^2 > 1e-9,   otherwise 0
    g = (g_u - c g_a) + rho g_a

In a conflict the task part becomes orthogonal to g_a; |c g_a| is at most |g_u|, however large c is. At theta_0 g_a is
zero, so the first step is plain SFT. theta_0 is the model with its fresh adapter off; without a fresh adapter (a
continued adapter, full fine-tuning) a copy of its trainable weights is kept. Of a step with several micro-batches, g_u
is the accumulated gradient, and the safe batch is as large as the task's of the whole step (or `safety_batch_size`).

Departures from the authors' code:
* positions: their sum runs over all positions, prompt and padding too, and is divided by the number of reply tokens, so
  that it grows with the padding. Here it runs over the completion; `positions: all` adds the prompt, never padding;
* gradients of several micro-batches add up, where the code keeps the last one;
* no dropout in the safe passes, where theirs makes g_a noise at theta_0;
* inner products are summed in float64, and logits exist for a few hundred tokens at a time.

The paper, *Beyond Average Safety*, has rho = 1 and all its safe pairs (`guide: null`), where the authors have 100.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from torch import Tensor, nn

from holdfast.core.seeding import generator
from holdfast.data.encode import Encoded
from holdfast.scoring.completion import IGNORE, completion_kl
from holdfast.training.hooks import DEFENSES, TrainingRun
from holdfast.training.side_pass import RowLoss, scored_tokens, token_mean_kl
from holdfast_lab.building_blocks.options import Options, option
from holdfast_lab.building_blocks.side_term import LEFT_OUT, SideTermDefense

Positions = Literal["completion", "all"]
SMALLEST_SQUARE = 1e-9


def conflict(task_safe: float, safe_safe: float) -> float:
    """c, from `<g_u, g_a>` and `|g_a|^2`: what of g_a to take away from g_u."""
    return task_safe / safe_safe if task_safe < 0 and safe_safe > SMALLEST_SQUARE else 0.0


def kl_everywhere(rows: Sequence[Encoded], reference: Callable[[], Any]) -> RowLoss:
    """Terms of `sum of KL(pi_0 || pi_theta) over every position that predicts a token / number of reply tokens`."""
    total = scored_tokens(rows)

    def loss(model: nn.Module, batch: dict[str, Tensor], _: list[int]) -> Tensor:
        shown = batch["attention_mask"].bool()
        labels = batch["input_ids"].masked_fill(~shown, IGNORE)
        return completion_kl(model, {**batch, "labels": labels}, 1, reference).total / total

    return loss


@DEFENSES.register("safegrad")
class SafeGrad(SideTermDefense):
    name = "safegrad"
    fsdp = True
    packs = True
    summary = "projects the task gradient off the gradient of the KL from the first model on safe pairs"
    passes = "2 forward + backward, 1 forward"
    needs = frozenset({"safety"})
    reference = "Yi et al., Gradient Surgery for Safe LLM Fine-Tuning, 2025"
    off = MappingProxyType({"rho": 0.0, "project": False})
    paper = MappingProxyType({"rho": 1.0, "guide": None})

    @dataclass(frozen=True, kw_only=True)
    class Config(Options):
        rho: float = option(1.0, "weight of the safe gradient that is added after the projection.", least=0)
        guide: int | None = option(
            100, "safe pairs that are used at most, a random choice made once; None are all of them.", least=1
        )
        positions: Positions = option(
            "completion", "what the KL runs over, `completion`, or `all` for the prompt too.",
            choices=get_args(Positions),
        )  # fmt: skip
        project: bool = option(True, "take the conflicting part away; without it, the step is that of `kl`.")

    config: Config

    def initialise(self, run: TrainingRun) -> None:
        run.theta_0.keep()

    def guide(self, run: TrainingRun) -> list[Encoded]:
        """The safe pairs to draw from, over all safety sets, the same in every run with this seed."""
        rows = run.data.safe
        order = generator(run.args.stream_seed, "safegrad guide").permutation(len(rows))
        return rows if self.config.guide is None else [rows[i] for i in order[: self.config.guide]]

    def on_gradient(self, run: TrainingRun) -> None:
        """Turn the task gradient into `(g_u - c g_a) + rho g_a`."""
        guide = self.guide(run)
        rows = [guide[i] for i in run.data.draw(guide, "safegrad")]
        kl = token_mean_kl if self.config.positions == "completion" else kl_everywhere
        losses, safe = run.engine.side_gradient(rows, kl(rows, run.theta_0.active))
        space = run.space()
        task = space.task_gradient()
        inner, square, task_square = space.dots([(task, safe), (safe, safe), (task, task)])
        value, active = float(losses.sum()), bool(self.config.rho or self.config.project)
        if active and not self._watch.accepts(run.progress.step, value, square):
            self._row = {"kl": None, "coefficient": None, "cosine": None, **LEFT_OUT}
            return
        c = conflict(inner, square) if self.config.project else 0.0
        if self.config.rho != c:
            space.add_to_gradient([safe], [self.config.rho - c])
        lengths = math.sqrt(square * task_square)
        self._row = {"kl": value, "coefficient": c, "cosine": inner / lengths if lengths else None}
