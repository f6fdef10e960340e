"""Which models the slot loop can run."""

from __future__ import annotations

from typing import Any

ATTENTION = ("sdpa", "eager")


def obstacle(model: Any) -> str | None:
    """Why the slot loop cannot run `model`; None when it can.

    Asked of the cache that transformers itself would build, not of the model's name: every layer has to keep all keys
    and values, and the model has to take positions and a four-dimensional mask as they are given.
    """
    adapters = getattr(model, "peft_config", {})
    base = model.get_base_model() if adapters else model
    for config in adapters.values():
        if getattr(config, "is_prompt_learning", False):
            return "the adapter adds virtual tokens to the prompt"
        if getattr(config, "alora_invocation_tokens", None):
            return "the adapter starts in the middle of the prompt"
    return _of_class(base) or _of_cache(base.config) or _of_place(model)


def _of_class(base: Any) -> str | None:
    kind = type(base).__name__
    config = base.config
    if config.is_encoder_decoder:
        return f"{kind} has an encoder"
    if config.get_text_config() is not config:
        return f"{kind} is not text alone"
    if not (getattr(base, "_supports_attention_backend", False) and getattr(base, "_can_compile_fullgraph", False)):
        return f"{kind} cannot run over a static cache"
    if config._attn_implementation not in ATTENTION:
        return f"attention {config._attn_implementation!r} takes no mask over a static cache"
    return None


def _of_cache(config: Any) -> str | None:
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    if kinds != {DynamicLayer}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds - {DynamicLayer}))
        return f"{config.model_type} layers do not keep all keys and values ({names or 'unknown layers'})"
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in (parameters, *nested):
        kind = str(rope.get("rope_type", "default"))
        if "dynamic" in kind or kind == "longrope":
            return f"position encoding {kind!r} depends on the longest row of a batch"
    return None


def _of_place(model: Any) -> str | None:
    devices = {str(parameter.device) for parameter in model.parameters()}
    return f"the model is spread over {', '.join(sorted(devices))}" if len(devices) > 1 else None
