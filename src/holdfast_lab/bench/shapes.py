"""Models at published shapes with random weights: right for timing, wrong for anything else.

Where the figures are from: Llama-3.1-8B and SmolLM2-135M, the `config.json` of their repositories on the hub.
Qwen3.5-4B, the text part of its model: sizes, heads, vocabulary, rotary base and share as in
`scripts/models/qwen3.5-4B.sh` of radixark/miles (which, unlike its script for 27B, does not untie the embeddings);
the linear-attention heads and `mrope_section` are the defaults of transformers' `Qwen3_5TextConfig`, and those
of the 9B's published configuration. Its vision tower and its extra prediction head take no part in training on text.
"""

from typing import Any

_HYBRID_ROPE = {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10], "mrope_interleaved": True,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
    "qwen3.5-4b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rope_parameters": _HYBRID_ROPE,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8, "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "rope_theta": 100000.0, "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    },
    "tiny-hybrid": {
        "model_type": "qwen3_5_text",
        "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "tie_word_embeddings": True,
    },
}  # fmt: skip
NAMES = {
    "llama-3.1-8b": "Llama-3.1-8B", "qwen3.5-4b": "Qwen3.5-4B", "smollm2-135m": "SmolLM2-135M",
    "tiny": "tiny", "tiny-hybrid": "tiny hybrid",
}  # fmt: skip
ADAPTED = ("q_proj", "k_proj", "v_proj")  # what LoRA adapts; a hybrid has these in its full-attention layers alone


def empty_model(shape: str, **changes: Any) -> Any:
    """A model of a shape on the meta device, names and sizes without weights; `changes` of its configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {"max_position_embeddings": 4096, "pad_token_id": 2, "eos_token_id": 2, **SHAPES[shape], **changes}
    config = AutoConfig.for_model(fields.pop("model_type", "llama"), **fields)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=weight_dtype())


def weight_dtype() -> Any:
    """bfloat16 on a GPU, float32 on a CPU, whose bfloat16 is emulated."""
    import torch

    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def random_model(shape: str, *, seed: int = 0, **changes: Any) -> Any:
    """A causal language model of a shape with random weights, filled on the GPU where there is one.

    Weights are drawn as transformers draws them for a new model: normal with deviation 0.02, norms at the identity,
    the decay of linear attention in its usual range; that also fills in rotary frequencies, buffers that the meta
    device left empty. Losses are then near log(vocabulary).
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = empty_model(shape, **changes).to_empty(device=device)
    model.tie_weights()
    torch.manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            model._init_weights(module)
    model.name_or_path = f"random/{shape}"
    return model.eval()
