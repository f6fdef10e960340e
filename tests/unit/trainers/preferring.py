"""DPO and GRPO on the tiny model, TRL's and ours from the same arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tests import tiny
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

import holdfast as hf

COMMON = {
    "max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 5e-3,
    "weight_decay": 0.1, "max_grad_norm": 0.5, "bf16": False, "use_cpu": True, "report_to": "none",
    "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False, "logging_strategy": "no",
}  # fmt: skip
DPO = {**COMMON, "max_length": 32, "disable_dropout": False}
GRPO = {**COMMON, "num_generations": 2, "max_completion_length": 4, "beta": 0.04}
OURS = {"safety_batch_size": 6, "safety_micro_batch_size": 8}
SLACK = hf.ChanceConstraint(tau=10.0, beta=0.0999, unit="kl_token")  # its gradient is not zero
TIGHT = hf.ChanceConstraint(tau=0.001, beta=1000.0, unit="kl_token")


def pairs(n: int = 12) -> Dataset:
    chosen, rejected = tiny.rows(n, seed=1, start="w1"), tiny.rows(n, seed=50, start="w1")
    both = zip(chosen, rejected, strict=True)
    return Dataset.from_list(
        [{"prompt": a["prompt"], "chosen": a["completion"], "rejected": b["completion"]} for a, b in both]
    )


def prompts(n: int = 12) -> Dataset:
    return Dataset.from_list([{"prompt": row["prompt"]} for row in tiny.rows(n, seed=1, start="w1")])


def even_words(completions: list[str], **_: Any) -> list[float]:
    """A reward that sampled replies differ in."""
    return [float(sum(word.strip("w") in "02468" for word in reply.split()) + len(reply) % 3) for reply in completions]


def start(folder: Path, *, layers: int = 1) -> Any:
    """A model that knows its folder: TRL loads the reference of full fine-tuning from there."""
    if not (folder / "start").exists():
        tiny.saved(folder / "start", layers=layers)
    return tiny.LlamaForCausalLM.from_pretrained(folder / "start")


def given(method: str, **changes: Any) -> dict[str, Any]:
    """The trainer's arguments but model and configuration; None leaves one out."""
    task = {"train_dataset": pairs()} if method == "dpo" else {"train_dataset": prompts(), "reward_funcs": even_words}
    made = {"processing_class": tiny.tokenizer(), "peft_config": tiny.lora(0.2), **task, **changes}
    return {name: value for name, value in made.items() if value is not None}


def trl(method: str, folder: Path, model: Any = None, *, own: dict[str, Any] | None = None, **options: Any) -> Any:
    """TRL's trainer; `own` replaces its arguments, `options` are fields of its configuration."""
    config, trainer, common = {"dpo": (DPOConfig, DPOTrainer, DPO), "grpo": (GRPOConfig, GRPOTrainer, GRPO)}[method]
    arguments = config(str(folder / "trl"), **{**common, **options})
    return trainer(start(folder) if model is None else model, args=arguments, **given(method, **(own or {})))


def safe(
    method: str, folder: Path, model: Any = None, *, own: dict[str, Any] | None = None, name: str = "safe",
    constraint: Any = SLACK, **options: Any,
) -> Any:  # fmt: skip
    """Ours, in the folder `name`."""
    config, trainer, common = {
        "dpo": (hf.SafeDPOConfig, hf.SafeDPOTrainer, DPO), "grpo": (hf.SafeGRPOConfig, hf.SafeGRPOTrainer, GRPO),
    }[method]  # fmt: skip
    settings = {**common, **OURS, "reference_cache": str(folder / "cache"), **options}
    held = {"safety_dataset": tiny.dataset(20, seed=2), "constraint": constraint}
    model = start(folder) if model is None else model
    return trainer(model, args=config(str(folder / name), **settings), **given(method, **{**held, **(own or {})}))


def trained(trainer: Any) -> dict[str, torch.Tensor]:
    trainer.train()
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
