"""What each process of `make test-deepspeed` does: the same problems under DDP and under ZeRO."""

from __future__ import annotations

import os
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import PartialState
from transformers import TrainerCallback

from holdfast.constraint.filter import SafetyFilter
from holdfast.constraint.gradients import ParameterSpace, trainable
from holdfast.core.ranks import rank, world
from tests import tiny
from tests.distributed import behaviour_cases, traffic_cases, worker
from tests.sharding import cells

AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
ADAM, KL = worker.PROBLEMS["adam"], {"constraint": worker.KL}
BATCH = {"name": "holdfast", "estimator": "batch"}  # then the barrier is of this step's own gradient
CASES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adam": ADAM,
    "adam, two micro-batches": {**ADAM, "accumulation": 2},
    "adam, gradient checkpointing": {**ADAM, "gradient_checkpointing": True},
    "adam, bf16": {**ADAM, "bf16": True},
    "adam, bf16, base in bfloat16": {**ADAM, "bf16": True, "base": torch.bfloat16},
    "adam, fused kernel": {**ADAM, "optim": "adamw_torch_fused"},
    "kl": KL,
    "kl, anchor and dual term": {**KL, **ADAM, "defense": {**worker.ANCHORED, "dual": 0.1}},
    "all weights": {**worker.PROBLEMS["full"], **ADAM},  # two groups of parameters: with weight decay and without
    "batch estimator": {**ADAM, "defense": BATCH},
}
ZERO: dict[str, dict[str, Any]] = {
    "stage 2": {"stage": 2},
    "stage 1": {"stage": 1},
    "round robin": {"stage": 2, "round_robin_gradients": True},
    "usual settings": {
        "stage": 2, "overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True,
        "reduce_bucket_size": "auto", "allgather_partitions": True, "allgather_bucket_size": 200,
        "offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"},
    },
    "loose gradients": {"stage": 2, "contiguous_gradients": False, "reduce_scatter": False},
}  # fmt: skip
LAYOUTS = [(name, "stage 2") for name in CASES]
LAYOUTS += [("adam, two micro-batches", kind) for kind in ZERO if kind != "stage 2"]
LAYOUTS += [("adam, bf16", "usual settings")]
COUNTED = [("lora", "stage 2"), ("lora", "stage 1"), ("lora", "usual settings"), ("full", "stage 2")]
Record = dict[str, Any]


def deepspeed(kind: str) -> dict[str, Any]:
    other: dict[str, Any] = {
        "steps_per_print": 1000,
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,
    }
    other |= {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    return {"deepspeed": {"zero_optimization": deepcopy(ZERO[kind]), **dict.fromkeys(AUTO, "auto"), **other}}


def make(folder: Path, *, accumulation: int = 1, base: torch.dtype = torch.float32, **settings: Any) -> Any:
    with mock.patch.object(tiny, "model", return_value=tiny.model().to(base)):
        return worker.make_trainer(folder, **{**worker.layout(accumulation), **settings})


class Weights(TrainerCallback):
    """A copy of the model's weights after every step, in the order of the optimizer's."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.steps = trainer, []

    def whole(self) -> torch.Tensor:
        parts = self.trainer.run.parts
        params = trainable(self.trainer.optimizer) if parts is None else parts.sources
        return torch.cat([p.detach().reshape(-1) for p in params])

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.steps.append(self.whole())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(self.whole())


@contextmanager
def barriers(record: Record):
    """Note the value and the gradient of the constraint at every step."""
    arm, record["values"], record["gradients"] = SafetyFilter.arm, [], []

    def noted(
        self: SafetyFilter, values: Any, gradients: Any, estimates: Any = None, limits: Any = (), verify: Any = None
    ) -> None:
        record["values"].append(float((estimates or values)[0]))
        whole = ParameterSpace(trainable(self.optimizer)).full(gradients[0])
        record["gradients"].append(torch.cat([x.reshape(-1) for x in whole]))
        arm(self, values, gradients, estimates, limits, verify)

    SafetyFilter.arm = noted
    try:
        yield
    finally:
        SafetyFilter.arm = arm


def trained(trainer: Any, resume: bool = False) -> Record:
    """Rows, weights after every step, the monitor's figures, and how much of the optimizer this rank holds."""
    watch = Weights(trainer)
    trainer.add_callback(watch)
    record: Record = {"rows": [], "rate": trainer.defense.config.rate}
    trainer.step_listeners.append(record["rows"].append)
    with barriers(record):
        trainer.train(resume_from_checkpoint=resume or None)
    own = ParameterSpace(trainable(trainer.run.parts.optimizer if trainer.run.parts else trainer.optimizer)).weights()
    share = sum(x.numel() for x in own) / sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    record["metrics"] = trainer.evaluate()
    trainer.save_model(str(Path(trainer.args.output_dir) / "final"))
    return {**record, "share": share, "steps": watch.steps, "weights": worker.weights(trainer)}


def spoiled(folder: Path, **settings: Any) -> Record:
    """A run whose third loss is not finite."""
    trainer = make(folder, **ADAM, **settings)
    inner = trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs) * (float("inf") if trainer.state.global_step == 2 else 1.0)

    trainer.compute_loss = compute_loss
    return trained(trainer)


def saving(folder: Path, **changes: Any) -> Any:
    """A run with dropout, momentum and checkpoints."""
    settings = {**worker.ADAM_WITH_DROPOUT, "save_strategy": "steps", "save_steps": cells.SAVE_EVERY}
    settings |= {"lr_scheduler_type": "linear", "warmup_steps": 2}
    return make(folder, **{**settings, **deepspeed("stage 2"), **changes})


def begin() -> None:
    PartialState(cpu=True)  # makes the process group, which `layout` asks for its size
    worker.let_accelerate_shard_on_the_cpu()


def under_ddp(folder: Path) -> None:
    begin()
    found: dict[str, Any] = {name: trained(make(folder / name, **settings)) for name, settings in CASES.items()}
    found["behaviour"] = behaviour_cases.trained(folder / "behaviour", watch=True)
    found["spoiled"] = spoiled(folder / "spoiled")
    torch.save(found, folder / f"{rank()}.pt")


def under_zero(folder: Path) -> None:
    begin()
    stage_2, slack = deepspeed("stage 2"), {**worker.ADAM_WITH_DROPOUT, "constraint": worker.SLACK}
    found: dict[str, Any] = {
        f"{name}, {kind}": trained(make(folder / f"{name}, {kind}", **CASES[name], **deepspeed(kind)))
        for name, kind in LAYOUTS
    }
    found["trl"] = worker.trained_by_trl(folder / "trl", **worker.ADAM_WITH_DROPOUT, **deepspeed("stage 2"))
    found["slack"] = trained(make(folder / "slack", **slack, **stage_2))
    found["whole"] = trained(saving(folder / "whole"))
    found["behaviour"] = behaviour_cases.trained(folder / "behaviour", watch=True, **deepspeed("stage 2"))
    found["spoiled"] = spoiled(folder / "spoiled", **deepspeed("stage 2"))
    found["traffic"] = {
        f"{name}, {kind}": traffic_cases.counted(
            folder / f"traffic {name}, {kind}", **traffic_cases.CASES[name], **deepspeed(kind)
        )
        for name, kind in COUNTED
    }
    found["fused"] = worker.refusal(make(folder / "fused", step="fused", **deepspeed("stage 2")).train)
    found["defense"] = worker.refusal(partial(make, folder / "defense", defense="penalty", **deepspeed("stage 2")))
    found["reentrant"] = worker.refusal(
        partial(
            make, folder / "reentrant", gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": True}, **deepspeed("stage 2"),
        )
    )  # fmt: skip
    torch.save(found, folder / f"{rank()}.pt")


def killed(folder: Path, kill: str) -> None:
    """Train until the last rank is killed."""
    begin()
    trainer = saving(folder / kill)
    if rank() == world() - 1:
        {"step": cells.die_in_step, "save": cells.die_in_save}[kill](trainer)
    trainer.train()


def resumed(folder: Path) -> None:
    """The killed runs, and a checkpoint of ZeRO under DDP."""
    begin()
    found: dict[str, Any] = {kill: trained(saving(folder / kill), resume=True) for kill in cells.KILLS}
    os.environ.pop("ACCELERATE_USE_DEEPSPEED")  # which accelerate has set, for every later trainer of this process
    other = saving(folder / "whole", deepspeed=None)
    found["under DDP"] = worker.refusal(partial(other.train, resume_from_checkpoint=True))
    torch.save(found, folder / f"resumed-{rank()}.pt")


def scarce(folder: Path) -> None:
    """One process whose first loss runs out of memory; what the run ends with."""
    begin()
    trainer = make(folder, **ADAM, **deepspeed("stage 2"))
    with mock.patch.object(trainer, "compute_loss", side_effect=torch.OutOfMemoryError("CUDA out of memory")) as loss:
        try:
            trainer.train()
        except torch.OutOfMemoryError:
            torch.save({"losses": loss.call_count}, folder / "0.pt")
