"""A tiny random Qwen3.5-style hybrid: blocks of linear attention and one of full attention, `tests.tiny`'s words."""

from __future__ import annotations

import torch
from peft import LoraConfig
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

ADAPTED = ["q_proj", "k_proj", "v_proj", "in_proj_qkv"]  # in_proj_qkv, so that the linear-attention blocks adapt too


def config(linear: int = 1) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=linear + 1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention"] * linear + ["full_attention"],
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
    )


def model(*, seed: int = 0, dtype: torch.dtype = torch.float32, linear: int = 1) -> Qwen3_5ForCausalLM:
    torch.manual_seed(seed)
    made = Qwen3_5ForCausalLM(config(linear))
    with torch.no_grad():  # logits of a size at which losses differ between examples
        made.lm_head.weight.mul_(8)
    return made.to(dtype)


def lora(dropout: float = 0.0, **kwargs) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=ADAPTED, task_type="CAUSAL_LM", **kwargs)
