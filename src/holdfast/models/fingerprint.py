"""Fingerprints: which weights a reference table, a checkpoint or a certificate belongs to.

A fingerprint is the sha256 of one line per tensor, `name dtype shape sha256(bytes)`, sorted by name: it depends on the
stored numbers alone.
"""

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.core.hashing import plain, sha256_json, sha256_lines

# A tensor on a GPU is brought over in pieces of this size, so that hashing needs no second copy of the model.
_PIECE_BYTES = 64 * 2**20
# Settings that say where a PEFT adapter was loaded from or how it is being used, not what it computes.
_ORIGIN = {"inference_mode", "base_model_name_or_path", "revision", "peft_version", "auto_mapping", "runtime_config"}


def _tensor_digest(tensor: Tensor) -> str:
    """Hex sha256 of a tensor's elements in row-major order, as the bytes of its own dtype."""
    plain = tensor.detach().as_subclass(Tensor).contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.sha256()
    for piece in torch.split(plain, _PIECE_BYTES):
        digest.update(piece.cpu().numpy().data)
    return digest.hexdigest()


def tensors_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Fingerprint of named tensors, tied ones counted once under their first name in alphabetical order."""
    unique: dict[tuple[object, ...], str] = {}
    for name, tensor in sorted(tensors.items()):  # tied weights are one stretch of memory read the same way
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        unique.setdefault(memory if tensor.numel() else (name,), name)
    names = sorted(unique.values())
    # hashlib releases the interpreter lock on large buffers: threads hash tensors side by side.
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(lambda name: _tensor_digest(tensors[name]), names))
    return sha256_lines(
        f"{name} {tensors[name].dtype} {list(tensors[name].shape)} {digest}"
        for name, digest in zip(names, digests, strict=True)
    )


def model_fingerprint(model: nn.Module) -> str:
    """Fingerprint of all parameters and persistent buffers.

    The state dict is what is hashed, so a quantised base counts with its packed weights and their scales.
    """
    return tensors_fingerprint({k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)})


def has_idle_adapter(model: nn.Module) -> bool:
    """Whether the model is a base with a fresh LoRA adapter: trainable are only LoRA's factors, and every B is zero.

    Such an adapter changes no output, whatever its rank, targets and the random A.
    """
    if not getattr(model, "peft_config", None):
        return False
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    second = [p for name, p in trainable.items() if ".lora_B." in name or ".lora_embedding_B." in name]
    first = [name for name in trainable if ".lora_A." in name or ".lora_embedding_A." in name]
    return len(first) + len(second) == len(trainable) and bool(second) and not any(p.any() for p in second)


def frozen_fingerprint(model: nn.Module) -> str:
    """Fingerprint of everything that is not trained, under the names it has without an adapter around it."""
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    state = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor) and k not in trainable}
    return tensors_fingerprint(
        {k.removeprefix("base_model.model.").replace(".base_layer.", "."): v for k, v in state.items()}
    )


def adapter_fingerprint(model: nn.Module) -> str | None:
    """Fingerprint of a PEFT model's adapters, settings and weights; None for a model without adapters.

    It survives saving and loading the adapter, and moving the base model to another folder.
    """
    if not (settings := adapter_settings(model)):
        return None
    from peft import get_peft_model_state_dict

    adapters: dict[str, Any] = {}
    for name, config in settings.items():
        # "auto" would ask the hub whether the base model's vocabulary was resized.
        weights = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
        adapters[name] = {"config": config, "weights": tensors_fingerprint(weights)}
    return sha256_json(adapters)


def adapter_settings(model: nn.Module) -> dict[str, Any]:
    """The settings of a PEFT model's adapters as JSON values; empty for a model without adapters."""
    return {
        name: plain({key: value for key, value in config.to_dict().items() if key not in _ORIGIN})
        for name, config in (getattr(model, "peft_config", None) or {}).items()
    }
