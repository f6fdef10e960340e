"""A tiny model, the adapter that aligned it (random, strong), and the two merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from holdfast.models.adapter import merge
from holdfast.runs.config import RunConfig, config_from_dict
from tests import tiny


def adapter(folder: Path, model: Any = None, *, scale: float = 0.3, seed: int = 11, **options: Any) -> Path:
    """The folder of a LoRA adapter with random factors, B of size `scale`."""
    settings = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "k_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    wrapped = get_peft_model(tiny.model() if model is None else model, LoraConfig(**{**settings, **options}))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if ".lora_B." in name:
                p.copy_(torch.randn(p.shape, generator=draw) * scale)
            elif ".lora_A." in name:
                p.copy_(torch.randn(p.shape, generator=draw) / p.shape[1] ** 0.5)
    wrapped.save_pretrained(folder)
    return folder


def merged(folder: Path, model: Any = None) -> Any:
    """The model with that adapter merged into it."""
    return merge(tiny.model() if model is None else model, folder)


def run_file(folder: Path, **changes: Any) -> RunConfig:
    """Settings of a run on an aligned model in `folder`: base, alignment adapter on it."""
    tiny.saved(folder / "base")
    on(adapter(folder / "alignment"), folder / "base")
    for name, start in (("task", "w1"), ("safety", "w0")):
        lines = [json.dumps(row) for row in tiny.rows(40, seed=len(name), start=start)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    values = {
        "model": str(folder / "alignment"), "dtype": "float32", "output_dir": str(folder / "out"),
        "task": {"data": str(folder / "task.jsonl")}, "safety": {"data": str(folder / "safety.jsonl")},
        "constraint": {"alpha": 0.2}, "lora": {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        "defense": {"name": "safelora", "mode": "threshold", "threshold": 1.0},
        "train": {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 0.05, "use_cpu": True,
                  "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "steps", "save_steps": 1},
    }  # fmt: skip
    return config_from_dict({**values, **changes})


def on(folder: Path, base: Path | str) -> Path:
    """The adapter with this base in its settings."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": str(base)}))
    return folder
