"""SaLoRA as a gradient filter: one safety direction is projected out of every gradient.

Paper: *Beyond Average Safety: Chance-Constrained LLM Fine-tuning* ("the paper") describes its baseline SaLoRA in these
words: a safety direction, computed once from the safe pairs, projected out of the gradient with strength 1. The method
of SaLoRA's authors (Li et al., ICLR 2025) is another one, and here under its own name, `salora`.

    u = grad L_safe(theta_0) / |grad L_safe(theta_0)|      once; L_safe: mean NLL over all completion tokens of the rows
    g <- g - strength <g, u> u                             every step, on the accumulated task gradient

with one norm and one inner product over all trainable parameters. u is computed at the first step, where the weights
still are theta_0, without dropout, and kept in the checkpoints.

What to expect: u is one direction among millions, and both signs along it are blocked, also the one that would make the
model safer. A fresh LoRA adapter has B = 0, so that the gradient of A is zero: u lies in the B factors alone and
depends on the random A. The paper's figures for it are close to plain fine-tuning. After clipping, which only scales,
an SGD step is orthogonal to u; an Adam step is not.

Readings that the paper leaves open, and what is done here:
* the norm is taken over all parameters together, not for each tensor;
* the direction comes from 128 random safe pairs, as many as SaLoRA's authors calibrate with; `rows: null` takes all.
The preset has the paper's strength, 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from holdfast.constraint.gradients import Vector
from holdfast.core.errors import NumericalError
from holdfast.core.library_types import LanguageModel
from holdfast.core.ranks import world
from holdfast.core.seeding import generator
from holdfast.data.encode import Encoded
from holdfast.training.hooks import DEFENSES, Defense, TrainingRun
from holdfast.training.side_pass import token_mean_nll
from holdfast.training.support import require_float32
from holdfast_lab.building_blocks.options import Options, option


def safety_direction(run: TrainingRun, rows: Sequence[Encoded]) -> Vector:
    """The gradient of the rows' mean token NLL at the current weights, with norm 1 over all parameters."""
    # Processes take equal shares; the rows that fill up the last share count nothing.
    filled = [rows[i % len(rows)] for i in range(-(-len(rows) // world()) * world())]
    loss = token_mean_nll(rows)

    def counted(model: LanguageModel, batch: dict[str, Tensor], positions: list[int]) -> Tensor:
        values = loss(model, batch, positions)
        return values * (torch.tensor(positions) < len(rows)).to(values)

    _, gradient = run.engine.side_gradient(filled, counted)
    norm = math.sqrt(run.space().dots([(gradient, gradient)])[0])
    if not 0 < norm < math.inf:
        raise NumericalError(
            f"salora_gradproj: the gradient of {len(rows)} safe pairs has norm {norm}; it gives no direction",
            remedy="check that the adapter reaches the output (lora: target_modules) and that losses are finite",
        )
    return [(g / norm).detach() for g in gradient]


@DEFENSES.register("salora_gradproj")
class SaLoRAGradientProjection(Defense):
    name = "salora_gradproj"
    fsdp = True
    packs = True
    summary = "projects one safety direction, found at the start, out of every gradient"
    passes = "1 forward + backward"
    needs = frozenset({"safety"})
    reference = "Beyond Average Safety: Chance-Constrained LLM Fine-tuning, its reading of SaLoRA"
    off = MappingProxyType({"strength": 0.0})
    paper = MappingProxyType({"strength": 1.0})

    @dataclass(frozen=True, kw_only=True)
    class Config(Options):
        strength: float = option(
            1.0, "share of the gradient's component along the direction that is taken away.", least=0, most=1,
            remedy="the paper uses 1",
        )  # fmt: skip
        rows: int | None = option(
            128, "safe pairs that the direction is computed from at most, a random choice; None are all of them.",
            least=1, remedy="use 128; null is all",
        )  # fmt: skip

    config: Config
    _direction: Vector | None = None

    def validate(self, run: TrainingRun) -> None:
        require_float32(run.model)

    def initialise(self, run: TrainingRun) -> None:
        """Forget a direction found for another model."""
        self._direction = None

    def attach(self, run: TrainingRun) -> None:
        """Keep the run, whose parameters shape the direction in a checkpoint."""
        self._run = run

    def on_gradient(self, run: TrainingRun) -> None:
        """`g <- g - strength <g, u> u`."""
        if self._direction is None:
            rows = run.data.safe
            order = generator(run.args.stream_seed, "salora_gradproj").permutation(len(rows))
            self._direction = safety_direction(run, [rows[i] for i in order[: self.config.rows]])
        space = run.space()
        task = space.task_gradient()
        along, square = space.dots([(task, self._direction), (task, task)])
        if self.config.strength:
            space.add_to_gradient([self._direction], [-self.config.strength * along])
        # The component along u before the projection.
        self._row = {"along": along, "cosine": along / math.sqrt(square) if square else None}

    def state_dict(self) -> dict[str, object]:
        found = self._direction
        return {"direction": None if found is None else self._run.space().full(found)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        stored = state["direction"]
        self._direction = None if stored is None else self._run.space().scatter(stored)
