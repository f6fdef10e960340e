"""Lisa: alignment and fine-tuning in turns, each held near where the other ended.

Paper: Huang et al., *Lisa: Lazy Safety Alignment for Large Language Models against Harmful Fine-tuning Attack* (NeurIPS
2024), Algorithm 1.

Of the steps t = 0, 1, ..., T - 1 the first K_align train on safe pairs, the next K_ft on the task, and so on. Each
phase minimises

    L(theta; batch of its own data) + rho/2 norm(theta - w)^2 [ t > 0.1 T ],    w = theta where the other phase ended

over all trainable parameters (LoRA's A and B apart, not their product), that is

    g = g_batch + rho (theta - w) [ t > 0.1 T ]

before clipping. Where the other phase ended, this one began: one copy w, theta_0 at first and taken again whenever the
phase changes, is the authors' pair of copies. One optimizer serves both phases; its moments are kept. In an alignment
step the task batch is thrown away for as many safe pairs, drawn without replacement inside a pass over them.
`finetune_steps: 0` is alignment alone, `align_steps: 0` fine-tuning alone.

Departures from the authors' code:
* t and the phases count optimizer steps, where the code counts micro-batches;
* the proximal term enters as its gradient, so the logged loss is the batch's own; `proximal_loss` is logged beside it;
* safe pairs are drawn from the run's seed and the step, so that a resumed run and any number of processes see the same;
* with fewer safe pairs than `guide`, all are used and a warning says so.
The defaults are those of the authors' script (rho = 1). The paper, *Beyond Average Safety*, has rho = 0.01, and 10000
guide pairs out of 5000 safe ones, which can only mean all of them (`preset: paper`).
"""

import logging
import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from holdfast.constraint.gradients import Vector
from holdfast.core.errors import ConfigError
from holdfast.core.ranks import rank
from holdfast.core.seeding import sample
from holdfast.data.encode import Encoded
from holdfast.data.streams import StepStream
from holdfast.training.hooks import DEFENSES, Defense, Inputs, Items, TrainingRun
from holdfast.training.support import require_float32
from holdfast_lab.building_blocks.options import Options, option

logger = logging.getLogger(__name__)
Phase = Literal["align", "finetune"]


@dataclass(frozen=True)
class Phases:
    """Which phase a step belongs to, as a function of the step alone."""

    align: int  # steps of an alignment phase; with 0 there is none
    finetune: int  # steps of a fine-tuning phase; with 0 there is none

    def at(self, step: int) -> Phase:
        return "align" if step % (self.align + self.finetune) < self.align else "finetune"

    def begins(self, step: int) -> bool:
        return step == 0 or self.at(step) != self.at(step - 1)

    def align_steps(self, step: int) -> int:
        """Alignment steps before this one."""
        rounds, rest = divmod(step, self.align + self.finetune)
        return rounds * self.align + min(rest, self.align)


def guide_rows(run: TrainingRun, most: int) -> list[Encoded]:
    """The safe pairs alignment may use: at most this many, chosen by the run's seed."""
    safe = run.data.safe
    if len(safe) < most and rank() == 0:
        logger.warning("lisa: guide=%d, but there are %d safe pairs; all of them are used", most, len(safe))
    return sample(safe, most, run.args.stream_seed, "lisa", "guide")


@DEFENSES.register("lisa")
class Lisa(Defense):
    name = "lisa"
    fsdp = True
    packs = True
    summary = "turns of alignment and fine-tuning, each held near the other's end"
    passes = "1 forward + backward"
    needs = frozenset({"safety"})
    reference = "Huang et al., Lisa, NeurIPS 2024"
    off = MappingProxyType({"align_steps": 0, "rho": 0.0})
    paper = MappingProxyType({"align_steps": 100, "finetune_steps": 900, "rho": 0.01, "guide": 10000})

    @dataclass(frozen=True, kw_only=True)
    class Config(Options):
        align_steps: int = option(100, "K_align, optimizer steps of an alignment phase.", least=0)
        finetune_steps: int = option(900, "K_ft, optimizer steps of a fine-tuning phase.", least=0)
        rho: float = option(1.0, "weight of the proximal term.", least=0)
        guide: int = option(10000, "most safe pairs used.", least=1, remedy="align_steps: 0 uses none")
        warmup_share: float = option(
            0.1, "share of the run's steps at its start without proximal term.", least=0, most=1
        )

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.align_steps + self.finetune_steps == 0:
                what = "lisa: align_steps and finetune_steps are both 0"
                raise ConfigError(what, remedy="the authors use align_steps 100 and finetune_steps 900")

    config: Config

    def validate(self, run: TrainingRun) -> None:
        """Trainable weights must be float32 where the proximal term is computed from them."""
        if self.config.rho:
            require_float32(run.model)

    def attach(self, run: TrainingRun) -> None:
        self._phases = Phases(self.config.align_steps, self.config.finetune_steps)
        self._guide = guide_rows(run, self.config.guide) if self.config.align_steps else []
        self._space = run.space  # looked up at each use: the parameter objects may be exchanged
        self._anchor: Vector | None = None

    def choose_batch(self, run: TrainingRun, inputs: Inputs, items: Items) -> tuple[Inputs, Items]:
        step, total, align = run.progress.step, run.progress.total_steps, self.config.align_steps
        if step == 0 and self.config.finetune_steps and total <= align:
            logger.warning(
                "lisa: all %d steps of this run are alignment steps (align_steps=%d): the task is never trained on",
                total, align,
            )  # fmt: skip
        if self._phases.at(step) == "finetune":
            return inputs, items
        # Counted in alignment steps: a pass over the safe pairs goes on where the last alignment phase left it.
        stream = StepStream(len(self._guide), run.data.task_batch, run.args.stream_seed, "guide")
        rows = [self._guide[i] for i in stream.indices(self._phases.align_steps(step))]
        batch, scored = run.data.own_share(rows)
        return batch, None if items is None else scored  # None: the loss is divided elsewhere, for these rows too

    def on_gradient(self, run: TrainingRun) -> None:
        """Add `rho (theta - w)`; theta is still what it was when this step, and perhaps a phase with it, began."""
        step, rho = run.progress.step, self.config.rho
        self._row = {"phase": self._phases.at(step)}
        if not rho:
            return
        space = run.space()
        if self._phases.begins(step):
            self._anchor = space.snapshot()
        assert self._anchor is not None
        apart = [theta - w for theta, w in zip(space.weights(), self._anchor, strict=True)]
        if active := step > self.config.warmup_share * run.progress.total_steps:
            space.add_to_gradient([apart], [rho])
        square = space.dots([(apart, apart)])[0]
        self._row |= {"distance": math.sqrt(square), "proximal_loss": rho / 2 * square if active else 0.0}

    def state_dict(self) -> dict[str, object]:
        return {"anchor": None if self._anchor is None else self._space().full(self._anchor)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._anchor = None if state["anchor"] is None else self._space().scatter(state["anchor"])
