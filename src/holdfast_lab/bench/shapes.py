"""Models at published shapes (`shapes.json`) with random weights: right for timing, wrong for anything else.

Where the figures are from: Llama-3.1-8B and SmolLM2-135M, the `config.json` of their repositories on the hub.
Qwen3.5-4B, the text part of its model: sizes, heads, vocabulary, rotary base and share as in
`scripts/models/qwen3.5-4B.sh` of radixark/miles (which, unlike its script for 27B, does not untie the embeddings);
the linear-attention heads and `mrope_section` are the defaults of transformers' `Qwen3_5TextConfig`, and those
of the 9B's published configuration. Its vision tower and its extra prediction head take no part in training on text.
"""

import json
from importlib.resources import files
from typing import Any

SHAPES: dict[str, dict[str, Any]] = json.loads(
    files("holdfast_lab.bench").joinpath("shapes.json").read_text(encoding="utf-8")
)
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
