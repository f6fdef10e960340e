"""A tiny model, the adapter that aligned it (random, strong), and the two merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from holdfast.models.adapter import merge
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
