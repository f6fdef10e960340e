"""The benchmarks' random models: those of `holdfast_lab.bench`, with the embedded tokenizer's vocabulary where tiny."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from holdfast_lab.bench import settings as shapes
from holdfast_lab.bench.settings import ADAPTED, SHAPES

__all__ = ["NAMES", "SHAPES", "random_adapter", "random_model"]

NAMES = {
    "llama-3.1-8b": "Llama-3.1-8B", "qwen3.5-4b": "Qwen3.5-4B", "smollm2-135m": "SmolLM2-135M",
    "tiny": "tiny", "tiny-hybrid": "tiny hybrid",
}  # fmt: skip


def _changes(shape: str) -> dict[str, Any]:
    """A tiny model that the tokenizer of SmolLM2 can speak to."""
    return {"vocab_size": 49152} if shape.startswith("tiny") else {}


def random_model(shape: str, *, seed: int = 0) -> Any:
    """A causal language model of a shape, on the GPU where there is one."""
    return shapes.random_model(shape, seed=seed, **_changes(shape))


def random_adapter(shape: str, folder: Path, *, rank: int = 32) -> Path:
    """A folder with a LoRA adapter on q, k and v of that shape, as PEFT writes it."""
    from peft import LoraConfig

    draw = torch.Generator().manual_seed(1)
    tensors = {}
    for name, module in shapes.empty_model(shape, **_changes(shape)).named_modules():
        if name.endswith(ADAPTED):
            rows, width = module.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = 0.01 * torch.randn(rank, width, generator=draw)
            tensors[f"base_model.model.{name}.lora_B.weight"] = 0.01 * torch.randn(rows, rank, generator=draw)
    config = LoraConfig(r=rank, lora_alpha=4, target_modules=sorted(ADAPTED), task_type="CAUSAL_LM")
    config.base_model_name_or_path = f"random/{shape}"
    folder.mkdir(parents=True)
    config.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
