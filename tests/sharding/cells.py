"""What each process of the sharding matrix does: one problem with other weights, steps and numbers of processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import holdfast as hf
from holdfast.core.ranks import rank, world
from tests import tiny
from tests.distributed import worker

STEPS, SAVE_EVERY, STRUCK = 5, 2, 4  # the step in which, or in whose checkpoint, a rank is killed
BASE = "base"  # folder of the weights that QLoRA packs
CELLS = {
    "ddp": ["lora two_pass", "lora fused", "full two_pass", "qlora two_pass"],
    "fsdp2": ["lora two_pass", "full two_pass", "qlora two_pass"],
}
DECLINED = {
    "ddp": ["full fused", "qlora fused"],
    "fsdp2": ["lora fused", "full fused", "qlora fused"],
}
# phi is flat below D = tau - 1/beta = -1/60. At D = 0 it must not be: there theta_0's rounding would decide.
LIMIT = {"tau": 0.05, "alpha": 0.3, "beta": 15.0}
UNITS = ("nll_token", "kl_token")
ADAM = {"optim": "adamw_torch", "learning_rate": 2e-2}  # divides by the size of gradients, however small they are
KILLS = ("step", "save")
Record = dict[str, Any]


def name_of(cell: str, unit: str, accumulation: int) -> str:
    return f"{cell}, {unit}, {accumulation} micro-batches"


def packed(root: Path) -> Any:
    """The tiny model in 4 bits. FSDP2 shards numbers of one type, so the packed bits are stored as float32."""
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32, bnb_4bit_quant_storage=torch.float32,
    )  # fmt: skip
    return AutoModelForCausalLM.from_pretrained(root / BASE, quantization_config=settings, dtype=torch.float32)


def make(
    root: Path, folder: Path, engine: str, cell: str, *, unit: str = "nll_token", accumulation: int = 1,
    dropout: float = 0.0, **changes: Any,
) -> hf.SafeSFTTrainer:  # fmt: skip
    """The trainer of a cell."""
    weights, step = cell.split()
    args = {
        **worker.BASE, **worker.SAFETY, **worker.layout(accumulation), "max_steps": STEPS, "step": step,
        "learning_rate": 1.0 if weights == "full" else 0.5, "reference_cache": str(folder / "cache"),
        **(worker.fsdp2() if engine == "fsdp2" else {}), **changes,
    }  # fmt: skip
    model = {"lora": tiny.model, "full": tiny.tied, "qlora": lambda: packed(root)}[weights]()
    return hf.SafeSFTTrainer(
        model, hf.SafeSFTConfig(str(folder), **args), processing_class=tiny.tokenizer(),
        train_dataset=tiny.dataset(48, seed=1, start="w1"),
        peft_config=None if weights == "full" else tiny.lora(dropout), safety_dataset=tiny.dataset(60, seed=2),
        constraint=hf.ChanceConstraint(unit=unit, **LIMIT),
    )  # fmt: skip


def trained(trainer: Any, resume: str | bool | None = None) -> Record:
    """Rows, both gradients of every step, and the weights at the end."""
    with worker.watched(trainer) as record:
        trainer.train(resume_from_checkpoint=resume)
    record["weights"], record["fused"] = worker.weights(trainer), trainer.run.engine.fused
    return record


# -- same numbers ------------------------------------------------------------------------------------------------------


def every_layout(root: Path, folder: Path, engine: str) -> dict[str, Record]:
    """Each cell in both units, whole and in two micro-batches."""
    found = {}
    for cell in CELLS[engine]:
        for unit in UNITS:
            for accumulation in (1, 2):
                name = name_of(cell, unit, accumulation)
                trainer = make(root, folder / name, engine, cell, unit=unit, accumulation=accumulation)
                found[name] = trained(trainer)
    return found


def declined(root: Path, folder: Path, engine: str) -> dict[str, tuple[str, int, str]]:
    """How fused steps are refused where there are none."""
    return {
        cell: worker.refusal(make(root, folder / cell, engine, cell, max_steps=1).train) for cell in DECLINED[engine]
    }


# -- killed and resumed ------------------------------------------------------------------------------------------------


def saving(root: Path, folder: Path, engine: str, cell: str) -> hf.SafeSFTTrainer:
    """A run with dropout, momentum and checkpoints."""
    kept = {"save_strategy": "steps", "save_steps": SAVE_EVERY, "dropout": 0.0 if "full" in cell else 0.2}
    return make(root, folder, engine, cell, **ADAM, **kept)


def die_in_step(trainer: Any) -> None:
    """The last rank is gone once the task's gradient of step `STRUCK` is there."""
    inner: Callable[[Any], None] = trainer.defense.on_gradient

    def on_gradient(run: Any) -> None:
        if run.progress.step + 1 == STRUCK:
            os.kill(os.getpid(), signal.SIGKILL)
        inner(run)

    trainer.defense.on_gradient = on_gradient


def die_in_save(trainer: Any) -> None:
    """The last rank is gone once it has written its part of the checkpoint of step `STRUCK`."""
    inner = trainer._write_state

    def write_state(folder: Path) -> Any:
        found = inner(folder)
        if trainer.state.global_step == STRUCK:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    trainer._write_state = write_state


def killed(root: Path, folder: Path, engine: str, cell: str, kill: str) -> None:
    """Train until the last rank is killed."""
    begin(engine)
    trainer = saving(root, folder / f"{kill} {cell}", engine, cell)
    if rank() == world() - 1:
        {"step": die_in_step, "save": die_in_save}[kill](trainer)
    trainer.train()


def resumed(root: Path, folder: Path, engine: str) -> dict[str, Record]:
    """What each killed run becomes."""
    return {
        f"{kill} {cell}": trained(saving(root, folder / f"{kill} {cell}", engine, cell), resume=True)
        for cell in CELLS[engine]
        for kill in KILLS
    }


def elsewhere(root: Path, folders: dict[int, Path], engine: str) -> dict[str, tuple[str, int, str]]:
    """How checkpoints of other numbers of processes are refused."""
    found = {}
    for count, source in folders.items():
        for cell in CELLS[engine] if count != world() else []:
            trainer = saving(root, source / f"whole {cell}", engine, cell)
            found[f"{cell} of {count}"] = worker.refusal(partial(trainer.train, resume_from_checkpoint=True))
    return found


# -- processes ---------------------------------------------------------------------------------------------------------


def begin(engine: str) -> None:
    PartialState(cpu=True)  # makes the process group, which `layout` asks for its size
    if engine == "fsdp2":
        worker.let_accelerate_shard_on_the_cpu()


def unbroken(root: Path, folder: Path, engine: str) -> None:
    """Everything that needs no death: stored as `unbroken-RANK.pt`."""
    begin(engine)
    found = {
        "layouts": every_layout(root, folder, engine),
        "declined": declined(root, folder, engine),
        "whole": {cell: trained(saving(root, folder / f"whole {cell}", engine, cell)) for cell in CELLS[engine]},
    }
    torch.save(found, folder / f"unbroken-{rank()}.pt")


def continued(root: Path, folder: Path, engine: str, others: dict[int, Path]) -> None:
    """The killed runs, resumed, and checkpoints of other numbers of processes: stored as `continued-RANK.pt`."""
    begin(engine)
    found = {"resumed": resumed(root, folder, engine), "elsewhere": elsewhere(root, others, engine)}
    torch.save(found, folder / f"continued-{rank()}.pt")
