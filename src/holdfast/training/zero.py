"""DeepSpeed's ZeRO-1 and 2: every rank holds the model, and one part of the optimizer's weights, gradients, moments.

The torch optimizer inside DeepSpeed's gets its parts as sharded tensors (DTensors) on the storage that DeepSpeed made.
The filter, its inner products and checkpoints are then those of FSDP2. What is changed in DeepSpeed and accelerate:

* `backward` ends with the reduced gradient. accelerate would take the step in it, before the constraints are measured.
* The step is one of the torch optimizer over all groups, which the filter corrects; then DeepSpeed copies the parts
  into the model and gathers them. Its own step goes group by group.
* Gradients of side rows come from `autograd.grad`, which leaves out DeepSpeed's gradient hooks. They are summed over
  the ranks and cut as the weights are.
* `bf16` is autocast, as under DDP. DeepSpeed's own would round the model's weights after each step to bfloat16, and
  with them most of a correction.

`support` says what is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import Trainer

from holdfast.constraint.gradients import ParameterSpace, Vector, shard
from holdfast.core.errors import UnsupportedError
from holdfast.core.ranks import rank, sum_in_place, world
from holdfast.training.hooks import Inputs

if TYPE_CHECKING:
    from holdfast.training.run import Run

PADDING = "_zero_padding"
USED = (
    "bit16_groups", "bit16_groups_flat", "single_partition_of_fp32_groups", "averaged_gradients", "all_grad_tensors",
    "micro_step_id", "scaled_global_norm", "unscale_and_clip_grads", "update_lp_params", "refresh_fp32_params",
)  # fmt: skip


class Parts:
    """This rank's part of each parameter group: where DeepSpeed keeps it, and how a whole vector is cut into it."""

    def __init__(self, engine: Any) -> None:
        self._zero = engine.optimizer
        _require_known(self._zero)
        self.optimizer: torch.optim.Optimizer = self._zero.optimizer
        self._first_micro_step = self._zero.micro_step_id
        self._flat: list[Tensor] = self._zero.bit16_groups_flat
        self._mesh = init_device_mesh(self._flat[0].device.type, (world(),))
        self.params: list[nn.Parameter] = []
        for group, part in zip(self.optimizer.param_groups, self._zero.single_partition_of_fp32_groups, strict=True):
            self.params.append(nn.Parameter(self._sharded(part.detach())))
            group["params"] = self.params[-1:]
        self._zero.step = self._step

    @property
    def sources(self) -> list[nn.Parameter]:
        """The model's trainable parameters, which autograd knows, in the order of the groups."""
        return [p for group in self._zero.bit16_groups for p in group]

    def cut(self, whole: Sequence[Tensor]) -> Vector:
        """This rank's part of a vector that is given by `sources`."""
        parts, tensors = [], iter(whole)
        for group, flat, part in zip(self._zero.bit16_groups, self._flat, self.params, strict=True):
            laid_out = torch.zeros(flat.shape, dtype=part.dtype, device=flat.device)
            for p in group:  # a view of `flat`
                place = p.storage_offset() - flat.storage_offset()
                laid_out.narrow(0, place, p.numel()).copy_(next(tensors).reshape(-1))
            size = shard(part).numel()
            parts.append(laid_out.narrow(0, rank() * size, size).clone())
        return parts

    def _sharded(self, part: Tensor) -> DTensor:
        return DTensor.from_local(part, self._mesh, [Shard(0)], run_check=False)

    def take_gradients(self) -> None:
        """Set `.grad` of each part to what DeepSpeed has reduced, whose own pieces become views of it."""
        for i, part in enumerate(self.params):
            pieces = self._zero.averaged_gradients[i]
            joined = torch.cat([piece.reshape(-1) for piece in pieces]).to(part.dtype)
            views = torch.split(joined, [piece.numel() for piece in pieces])
            for view, piece in zip(views, pieces, strict=True):
                setattr(view, PADDING, getattr(piece, PADDING, False))  # which DeepSpeed's norm leaves out
            self._zero.averaged_gradients[i] = list(views)
            part.grad = self._sharded(joined)

    def clip(self) -> float:
        """Scale the gradient to at most `gradient_clipping`, as DeepSpeed does; returns its norm before."""
        gradients = [shard(part.grad) for part in self.params if part.grad is not None]
        if not gradients:  # the step is discarded
            return 0.0
        norm = self._zero.scaled_global_norm()
        self._zero.unscale_and_clip_grads(gradients, norm)
        self._zero._global_grad_norm = norm
        return float(norm)

    def _step(self, closure: None = None) -> None:
        """In the place of DeepSpeed's: the torch optimizer's step with its hooks, then whole weights in the model."""
        self.optimizer.step()
        self._zero.update_lp_params()
        self._zero.micro_step_id, self._zero.overflow = self._first_micro_step, False
        for i, part in enumerate(self.params):
            self._zero.averaged_gradients[i] = self._zero.all_grad_tensors[i] = part.grad = None

    def refresh(self) -> None:
        """Take over weights that were loaded into the model."""
        self._zero.refresh_fp32_params()


def _require_known(zero: Any) -> None:
    """Refuse a version of DeepSpeed whose optimizer is made otherwise."""
    missing = [name for name in USED if not hasattr(zero, name)]
    if missing:
        raise UnsupportedError(
            f"this version of DeepSpeed: its {type(zero).__name__} has no {', '.join(missing)}",
            remedy="pip install deepspeed==0.19.8, with which the filter was run, or use FSDP2",
        )


class PartSpace(ParameterSpace):
    """Vectors over the parts."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts.params)
        self.parts = parts


class SourceGradient:
    """The gradient of side rows by the model's parameters, added up over passes."""

    def __init__(self, space: PartSpace) -> None:
        self._parts = space.parts
        self._sum = [torch.zeros_like(p) for p in self._parts.sources]

    def add(self, loss: Tensor) -> None:
        """Differentiate without `.grad`, where DeepSpeed's hooks would take it for the task's."""
        found = torch.autograd.grad(loss, self._parts.sources, allow_unused=True)
        for total, part in zip(self._sum, found, strict=True):
            if part is not None:
                total.add_(part)

    def reduced(self) -> Vector:
        """This rank's part of the sum over all ranks."""
        sum_in_place(self._sum)
        return self._parts.cut(self._sum)


class HeldEngine:
    """In the place of accelerate's `DeepSpeedEngineWrapper`, whose backward also steps."""

    def __init__(self, engine: Any, parts: Parts) -> None:
        self.engine, self._parts = engine, parts

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: object) -> None:
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self._parts.take_gradients()

    def get_global_grad_norm(self) -> float:
        """Asked for where the Trainer clips."""
        return self._parts.clip()


@contextmanager
def _weights_as_they_are(config: dict[str, Any]) -> Iterator[None]:
    """A context in which DeepSpeed reads `bf16` as off, so that it casts no weights; accelerate reads it before."""
    precision = config.get("bf16", {})
    wanted = precision.get("enabled", False)
    config["bf16"] = {**precision, "enabled": False}
    try:
        yield
    finally:
        config["bf16"]["enabled"] = wanted


class ZeroTrainer(Trainer):
    """Training with DeepSpeed's step taken apart, where DeepSpeed is used."""

    run: Run

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's, with autocast where `bf16` is set, which accelerate leaves to DeepSpeed."""
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled and self.accelerator.mixed_precision == "bf16":
            self.accelerator.native_amp = True

    def optimizer_parts(self) -> dict[str, str]:
        """How the optimizer's state lies in a checkpoint, where it is not by parameter."""
        if not self.is_deepspeed_enabled:
            return {}
        zero = self.accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]
        return {"optimizer_parts": "ZeRO, round robin" if zero.get("round_robin_gradients") else "ZeRO"}

    def create_scheduler(self, *args: object, **kwargs: object) -> LRScheduler:
        """As the Trainer's, which calls it as soon as DeepSpeed's engine is made; the scheduler wraps `step`."""
        wrapped = getattr(self.accelerator, "deepspeed_engine_wrapped", None)
        if wrapped is not None and not isinstance(wrapped, HeldEngine):
            engine = wrapped.engine
            self.run.parts = Parts(engine)
            self.accelerator.deepspeed_engine_wrapped = HeldEngine(engine, self.run.parts)
            self.optimizer.step = MethodType(lambda _: engine.step(), self.optimizer)
        scheduler: LRScheduler = super().create_scheduler(*args, **kwargs)
        return scheduler

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader[Inputs], resume_from_checkpoint: str | None
    ) -> Any:
        """As the Trainer's, which would look for a checkpoint of DeepSpeed's form."""
        if not self.is_deepspeed_enabled:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self.accelerator.native_amp:  # wraps `forward`, as for DDP
            self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
        with _weights_as_they_are(self.accelerator.deepspeed_plugin.deepspeed_config):
            prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        if resume_from_checkpoint is not None:
            self._load_from_checkpoint(resume_from_checkpoint)
            if self.run.parts is not None:
                self.run.parts.refresh()
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return prepared
