"""Models at their published shapes with random weights: right for timing, wrong for anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "rope_theta": 100000.0, "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 49152, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    },
}  # fmt: skip
NAMES = {"llama-3.1-8b": "Llama-3.1-8B", "smollm2-135m": "SmolLM2-135M", "tiny": "tiny"}


def random_model(shape: str, *, seed: int = 0) -> Any:
    """A causal language model of a shape, bfloat16, on the GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=4096, pad_token_id=2, eos_token_id=2)
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device=device)
    model.tie_weights()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.fill_(1.0)
            else:
                tensor.normal_(0.0, 0.02)
        _restore_rotary(model)
    model.name_or_path = f"random/{shape}"
    return model.eval()


def random_adapter(shape: str, folder: Path, *, rank: int = 32) -> Path:
    """A folder with a LoRA adapter on q, k and v of that shape, as PEFT writes it."""
    from peft import LoraConfig

    sizes = SHAPES[shape]
    width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    out = {"q_proj": width, "k_proj": width // heads * sizes["num_key_value_heads"]}
    out["v_proj"] = out["k_proj"]
    draw = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(sizes["num_hidden_layers"]):
        for name, rows in out.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = 0.01 * torch.randn(rank, width, generator=draw)
            tensors[f"{place}.lora_B.weight"] = 0.01 * torch.randn(rows, rank, generator=draw)
    config = LoraConfig(r=rank, lora_alpha=4, target_modules=sorted(out), task_type="CAUSAL_LM")
    config.base_model_name_or_path = f"random/{shape}"
    folder.mkdir(parents=True)
    config.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _restore_rotary(model: Any) -> None:
    """Rotary frequencies are buffers that the meta device left empty."""
    rotary = model.model.rotary_emb
    fresh = type(rotary)(config=model.config)
    for name, buffer in fresh.named_buffers():
        getattr(rotary, name).copy_(buffer)
