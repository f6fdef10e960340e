"""Which models the fused step can train: it looks inside LoRA layers and attention, and must know what it finds there.

What cannot be told from names is measured (`probe`).
"""

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from holdfast.core.errors import UnsupportedError
from holdfast.core.library_types import LanguageModel, ModelConfig
from holdfast.models.lora_layers import LoraLayer, lora_layers
from holdfast.models.token_mixers import token_mixers
from holdfast.scoring.head import causal_lm

ATTENTION_ROLES = ("self_attn", "self_attention", "attention", "attn")
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def plain_layers(model: LanguageModel) -> list[LoraLayer] | str:
    """The LoRA layers, or why the fused step cannot train this model."""
    if not getattr(model, "peft_config", None):
        return "all weights are trained, not a LoRA adapter"
    try:
        layers = lora_layers(model, defense="the fused step")
    except UnsupportedError as error:
        return str(error.what).replace("defense 'the fused step'", "the fused step")
    own = {id(p) for layer in layers for p in (layer.A, layer.B)}
    others = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in own]
    if others:
        return f"{len(others)} trained tensors are not LoRA factors (such as {others[0]})"
    frozen = [layer.name for layer in layers if not (layer.A.requires_grad and layer.B.requires_grad)]
    if frozen:
        return f"LoRA factors are frozen (those of {frozen[0]})"
    return _foreign(layers) or _of_model(model, layers) or layers


def _foreign(layers: Sequence[LoraLayer]) -> str | None:
    """Layers that do more than PEFT's: kernels that compute LoRA's gradients themselves, hooks, other parts."""
    from peft.tuners.lora.layer import Linear

    for layer in layers:
        module, name = layer.module, layer.adapter
        if type(module) is not Linear or "forward" in module.__dict__:
            return f"the LoRA layer of {layer.name} is not PEFT's own ({type(module).__name__})"
        if module.merged:
            return f"the adapter is merged into {layer.name}"
        if module.disable_adapters or list(module.active_adapters) != [name]:
            return f"the adapter of {layer.name} is not the active one"
        if (inside := _foreign_parts(layer)) is not None:
            return inside
    return None


def _foreign_parts(layer: LoraLayer) -> str | None:
    module, name = layer.module, layer.adapter
    factors, dropout = (module.lora_A[name], module.lora_B[name]), module.lora_dropout[name]
    for part in factors:
        if type(part) is not nn.Linear or getattr(part, "bias", None) is not None or "forward" in vars(part):
            return f"the LoRA factors of {layer.name} are not plain linear maps ({type(part).__name__})"
    if type(dropout) not in (nn.Dropout, nn.Identity):
        return f"the LoRA layer of {layer.name} has a dropout of another kind ({type(dropout).__name__})"
    if any(getattr(part, hooks, None) for part in (module, *factors, dropout) for hooks in MODULE_HOOKS):
        return f"the LoRA layer of {layer.name} has hooks"
    if any(getattr(p, hooks, None) for p in (layer.A, layer.B) for hooks in TENSOR_HOOKS):
        return f"the LoRA factors of {layer.name} have gradient hooks"
    return None


def _of_model(model: LanguageModel, layers: Sequence[LoraLayer]) -> str | None:
    inner = causal_lm(model)
    kind, config = type(inner).__name__, inner.config.get_text_config()
    named = any(name.rpartition(".")[2] == "experts" for name, _ in inner.named_modules())
    if named or any(getattr(config, name, None) for name in EXPERTS):
        return f"{kind} has experts, whose tokens are reordered"
    if any(hasattr(module, "apply_qkv") for module in inner.modules()):
        return "attention with its own LoRA kernels"
    of_lora = {id(module) for layer in layers for module in layer.module.lora_dropout.children()}
    for name, module in inner.named_modules():
        if isinstance(module, _DropoutNd) and module.p > 0 and id(module) not in of_lora:
            return f"dropout inside the model ({name})"
        if own := own_dropout(module):
            return f"dropout inside the model ({name}.{own[0]})"
    return None


def own_dropout(module: nn.Module) -> list[str]:
    """Rates of dropout that a module applies without a module: attention in its kernel, OPT's kin in a layer."""
    return [name for name, rate in vars(module).items() if "drop" in name and isinstance(rate, float) and rate > 0]


def other_mixers(model: LanguageModel) -> list[nn.Module] | str:
    """Token mixers that are not attention, or why they cannot be found."""
    try:
        mixers = token_mixers(model)
    except UnsupportedError as error:
        return str(error.what)
    return [mixer for name, mixer in mixers if name.rpartition(".")[2] not in ATTENTION_ROLES]


def batch_dependent(config: ModelConfig, longest: int | None) -> str | None:
    """Rotary embeddings that change for a whole batch when one of its rows is long (of at most `longest` tokens)."""
    found = getattr(config, "rope_parameters", None) or {}
    own = "original_max_position_embeddings"
    for rope in [value for value in found.values() if isinstance(value, dict)] or [found]:  # one per kind of layer
        kind, held = rope.get("rope_type"), rope.get(own) or getattr(config, own, None)
        if kind == "dynamic":
            held = held or getattr(config, "max_position_embeddings", None)
        if kind in ("dynamic", "longrope") and (longest is None or held is None or longest > held):
            return f"{kind} rotary embeddings change all rows of a batch when one is longer than {held} tokens"
    return None
