"""A trainer on the tiny model in one call, with everything that a test may want to exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests import tiny

import holdfast as hf

COMMON = {
    "max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "learning_rate": 5e-3,
    "lr_scheduler_type": "constant", "bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no",
    "max_length": 32, "disable_tqdm": True, "gradient_checkpointing": False,
}  # fmt: skip
SLACK = hf.ChanceConstraint(tau=1e6, beta=10.0, unit="nll_token")
TIGHT = hf.ChanceConstraint(tau=0.01, beta=100.0, unit="nll_token")


def model():
    """One layer: a run is a third cheaper than with two. `deep` is for what layers have to do with each other."""
    return tiny.model(layers=1)


def task(n: int = 12):
    return tiny.dataset(n, seed=1, start="w1")


def safety(n: int = 20, *, seed: int = 2):
    return tiny.dataset(n, seed=seed)


def arguments(folder: Path, **options: Any) -> hf.SafeSFTConfig:
    cache = options.pop("reference_cache", str(folder / "cache"))
    at_once = {"safety_micro_batch_size": 8}  # more rows than a step has: fewer passes for the noise floor
    return hf.SafeSFTConfig(str(folder / "run"), reference_cache=cache, **{**COMMON, **at_once, **options})


def build(folder: Path, *, given: dict[str, Any] | None = None, **options: Any) -> hf.SafeSFTTrainer:
    """A trainer.

    Args:
        given: replaces the trainer's own arguments; None leaves one out.
        options: fields of `SafeSFTConfig`.
    """
    defaults = {
        "model": model, "processing_class": tiny.tokenizer, "train_dataset": task, "safety_dataset": safety,
        "peft_config": tiny.lora, "constraint": lambda: SLACK,
    }  # fmt: skip
    chosen = dict(given or {})
    for name, make in defaults.items():
        if name not in chosen:
            chosen[name] = make()
    chosen.setdefault("args", arguments(folder, **options))
    # Left out, the safety set would be built by asking the model.
    return hf.SafeSFTTrainer(**{n: value for n, value in chosen.items() if value is not None or n == "safety_dataset"})


def deep(folder: Path, *, given: dict[str, Any] | None = None, **options: Any) -> hf.SafeSFTTrainer:
    """The same with two layers, and safety rows in micro-batches as large as the task's."""
    options = {"safety_micro_batch_size": None, **options}
    return build(folder, given={"model": tiny.model(), **(given or {})}, **options)


def weights(trainer: hf.SafeSFTTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
