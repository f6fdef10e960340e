"""A training run as the parts of a step see it: where it is, its data, its reference, and its engine.

`Run` is composed of small objects and handed to defenses, which know it by the protocol in `hooks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from holdfast.constraint.gradients import ParameterSpace, reshard, shard, trainable
from holdfast.core.errors import UnsupportedError
from holdfast.core.library_types import LanguageModel
from holdfast.data.encode import Encoded
from holdfast.models.fingerprint import has_idle_adapter
from holdfast.scoring.completion import adapters_off
from holdfast.scoring.forward import Forward
from holdfast.scoring.reference_states import KeptReference
from holdfast.training.config import SafeSFTConfig, SafetyArguments
from holdfast.training.fitting import Fitting
from holdfast.training.hooks import Defense, Items
from holdfast.training.side_data import SideData
from holdfast.training.step import StepEngine, choose_engine
from holdfast.training.zero import Parts, PartSpace

if TYPE_CHECKING:
    from holdfast.training.trainer import SafeTrainer

NUDGE = 1e-5  # of an adapter's weights: far too little to change what the model says


class Progress:
    """Where a run is."""

    def __init__(self, trainer: SafeTrainer) -> None:
        self._trainer = trainer
        self.micro = 0  # micro-batches of the step in progress that are through
        self.items: Items = None  # scored tokens of the step in progress
        self.known: tuple[Tensor, Tensor] | None = None  # an engine's loss, and its copy on the host

    def on_host(self, loss: Tensor) -> Tensor:
        """The loss, or its copy on the host: reading that does not wait for a backward in progress."""
        known, self.known = self.known, None
        return loss if known is None or known[0] is not loss else known[1]

    @property
    def stage(self) -> str:
        """`align` or `finetune`: what this run is."""
        return str(self._trainer.args.stage)

    @property
    def step(self) -> int:
        """Optimizer steps completed."""
        return int(self._trainer.state.global_step)

    @property
    def epoch(self) -> float:
        """Passes over the task data completed, with fractions."""
        return float(self._trainer.state.epoch or 0.0)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return int(self._trainer.state.max_steps)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of this step; the last of an epoch may have fewer."""
        return int(self._trainer.current_gradient_accumulation_steps)

    @property
    def last_micro_batch(self) -> bool:
        """Whether the optimizer steps after the micro-batch in progress."""
        return bool(self._trainer.accelerator.sync_gradients)


class Theta0:
    """The model as it entered training: its fresh adapter off, or its first weights put back meanwhile."""

    def __init__(self, trainer: SafeTrainer) -> None:
        self._trainer = trainer
        # Whether a fresh adapter can be switched off: not beside another one, which would go with it.
        self.idle_adapter = has_idle_adapter(trainer.model) and len(trainer.model.peft_config) == 1
        self.kept: KeptReference | None = None  # theta_0 on the examples that are held in a KL, where it cannot
        self._weights: list[tuple[nn.Parameter, Tensor]] | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which the model is theta_0."""
        if self.idle_adapter:
            with adapters_off(self._trainer.model):
                yield
            return
        if self._weights is None:
            raise UnsupportedError(
                "theta_0 was not kept", remedy="call run.theta_0.keep in initialise, or start from a fresh adapter"
            )
        params, values = zip(*self._weights, strict=True)
        with ParameterSpace(params).exchanged(list(values)):
            yield

    @contextmanager
    def nudged(self) -> Iterator[None]:
        """A context in which every weight of a fresh adapter is `NUDGE` higher or lower, at random.

        An adapter whose B is zero changes no bit, so that a KL from theta_0 is exactly zero. With any other one
        rounding shows at once, and hardly grows with the distance.
        """
        model = self._trainer.model
        moved = [shard(p) for p in model.parameters() if p.requires_grad] if self.idle_adapter else []
        before = [weight.clone() for weight in moved]
        try:
            for weight in moved:
                draw = torch.Generator(weight.device).manual_seed(0)
                weight.add_(torch.empty_like(weight).bernoulli_(generator=draw).sub_(0.5), alpha=2 * NUDGE)
            reshard(model)
            yield
        finally:
            for weight, first in zip(moved, before, strict=True):
                weight.copy_(first)
            reshard(model)

    def keep_states(self, examples: Sequence[Encoded]) -> None:
        """Keep theta_0 on these examples, where no fresh adapter can be switched off; the model must still be it."""
        if examples and not self.idle_adapter:
            self.kept = KeptReference.of(self._trainer.run.forward, examples)

    def keep(self) -> None:
        """Copy the trainable weights, for `active` where no fresh adapter can be switched off.

        To be called in `initialise`: a checkpoint is loaded after it.
        """
        if self.idle_adapter or self._weights is not None:
            return
        if self._trainer.is_fsdp_enabled:
            raise UnsupportedError(
                f"defense {self._trainer.defense.name!r} with FSDP2 and no fresh adapter: theta_0 cannot be kept in "
                "shards",
                remedy="train a fresh LoRA adapter (adapter_policy: merge), or use DDP",
            )
        self._weights = [(p, p.detach().clone()) for p in self._trainer.model.parameters() if p.requires_grad]


class Run:
    """A training run, as engines see it and, by the protocol `hooks.TrainingRun`, defenses."""

    def __init__(self, trainer: SafeTrainer, data: SideData, fitting: Fitting) -> None:
        self.trainer, self.data, self.fitting = trainer, data, fitting
        self.folder: Path = trainer.run_dir
        self.progress, self.theta_0 = Progress(trainer), Theta0(trainer)
        self.step_declined: str | None = None  # why fused steps are not possible, where they were asked for
        self.parts: Parts | None = None  # of the optimizer under DeepSpeed's ZeRO-2, once training has made them

    @property
    def model(self) -> LanguageModel:
        return self.trainer.model

    @property
    def args(self) -> SafetyArguments:
        return self.trainer.args

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.trainer.optimizer

    @property
    def defense(self) -> Defense:
        return self.trainer.defense

    @cached_property
    def engine(self) -> StepEngine:
        """How this run's gradients are computed; decided, and logged, at the first step."""
        return choose_engine(self)

    @property
    def engine_name(self) -> str | None:
        """Of `StepEngine`; None before the first step."""
        return self.engine.name if "engine" in vars(self) else None

    @property
    def side_rows(self) -> int:
        """Side rows per process and pass."""
        return int(self.args.safety_micro_batch_size or self.args.per_device_train_batch_size)

    @property
    def forward(self) -> Forward:
        args, trainer = self.args, self.trainer
        return Forward(
            self.model, pad_token_id=trainer.processing_class.pad_token_id,
            batch_size=min(args.safety_eval_batch_size, self.fitting.eval_rows or args.safety_eval_batch_size),
            device=args.device, precision=trainer.accelerator.autocast, kept=self.theta_0.kept,
        )  # fmt: skip

    def other_loss(self) -> str | None:
        args, trainer = self.args, self.trainer
        if not isinstance(args, SafeSFTConfig):
            return f"{trainer.method}'s loss is not of labelled rows"
        cases = {
            f"loss_type {args.loss_type!r} is not nll": args.loss_type not in (None, "nll"),
            "label smoothing": args.label_smoothing_factor != 0,
            "a compute_loss_func of your own": getattr(trainer, "compute_loss_func", None) is not None,
            "an auxiliary loss": bool(getattr(trainer, "aux_loss_enabled", False)),
        }
        return next((what for what, present in cases.items() if present), None)

    def space(self) -> ParameterSpace:
        if self.parts is not None:
            return PartSpace(self.parts)
        return ParameterSpace(trainable(torch_optimizer(self.optimizer)))


def torch_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The torch optimizer inside accelerate's wrapper and, under ZeRO-2, DeepSpeed's."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    inner: torch.optim.Optimizer = optimizer
    return inner
