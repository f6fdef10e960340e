"""The trainers that are compared: each path is a real trainer over the same rows, with the same LoRA and optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback, ProgressCallback
from trl import SFTConfig, SFTTrainer

from holdfast.constraint.chance import ChanceConstraint, Unit
from holdfast.training.config import SafeSFTConfig
from holdfast.training.trainer import SafeSFTTrainer
from holdfast_lab.bench.rows import rows, safety_pairs, task_pairs, word_tokenizer
from holdfast_lab.bench.settings import BASELINE, Cell
from holdfast_lab.bench.shapes import ADAPTED, random_model

CONSTRAINT_ROWS, MONITOR_ROWS = 64, 8
MAX_LENGTH = 1024  # TRL's default
LEARNING_RATE, LORA_ALPHA = 1e-5, 4
# How each constrained path takes its step; fields of `SafeSFTConfig`.
STEPS = {
    "two_pass": {"step": "two_pass"},
    "fused": {"step": "fused", "step_graphs": "off", "skip_inactive_rows": "off"},
    "holdfast": {"step": "fused", "step_graphs": "auto", "skip_inactive_rows": "auto"},
}


@dataclass(frozen=True)
class Material:
    """The rows of a measurement and what reads them."""

    tokenizer: Any
    task: list[dict[str, str]]
    safety: dict[str, list[dict[str, str]]]

    @classmethod
    def of(cls, cell: Cell) -> Material:
        """Rows for every step of a cell, each used once; the same for all paths of a group."""
        size = (cell.steps + cell.warm_up) * cell.batch
        constraint = max(CONSTRAINT_ROWS, cell.safety_batch)
        how: dict[str, Any] = {"seed": cell.seed, "length": cell.length}
        safe = rows(safety_pairs(constraint + MONITOR_ROWS, **how), seed=cell.seed, name="safety")
        task = rows(task_pairs(cell.task, size, **how), seed=cell.seed, name="task")
        return cls(word_tokenizer(), task, {"constraint": safe[:constraint], "monitor": safe[constraint:]})


def build(cell: Cell, material: Material, folder: Path, cache: Path, callbacks: list[Any]) -> Any:
    """The trainer of a path over a freshly made model; reference losses are in `cache`, nothing else is kept."""
    gpu = torch.cuda.is_available()
    length = max(MAX_LENGTH, cell.length or 0)
    arguments: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": cell.steps + cell.warm_up, "per_device_train_batch_size": cell.batch,
        "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "max_length": length, "bf16": gpu,
        "use_cpu": not gpu, "gradient_checkpointing": cell.checkpointing, "save_strategy": "no", "report_to": "none",
        "logging_strategy": "no", "disable_tqdm": True, "seed": cell.seed,
    }  # fmt: skip
    shared: dict[str, Any] = {
        "model": random_model(cell.shape), "train_dataset": Dataset.from_list(material.task),
        "processing_class": material.tokenizer, "peft_config": adapter(cell.rank), "callbacks": callbacks,
    }  # fmt: skip
    if cell.path == BASELINE:
        trainer = SFTTrainer(args=SFTConfig(**arguments), **shared)
    elif cell.path == "sft":
        trainer = SafeSFTTrainer(args=SafeSFTConfig(**arguments), defense="sft", **shared)
    else:
        safe: dict[str, Any] = {
            "safety_batch_size": cell.safety_batch,
            "reference_cache": str(cache),
            **STEPS[cell.path],
        }
        trainer = SafeSFTTrainer(
            args=SafeSFTConfig(**arguments, **safe),
            safety_dataset=material.safety,
            constraint=ChanceConstraint(
                tau=cell.tau, beta=1 / cell.tau, unit=cast(Unit, cell.unit), allow_tau_below_noise=True
            ),
            defense="holdfast",
            **shared,
        )
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    return trainer


def adapter(rank: int) -> LoraConfig:
    """LoRA on q, k and v."""
    return LoraConfig(
        r=rank, lora_alpha=LORA_ALPHA, lora_dropout=0.0, target_modules=list(ADAPTED), task_type="CAUSAL_LM"
    )
