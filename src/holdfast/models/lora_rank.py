"""Giving a LoRA adapter factors of another rank, with s = lora_alpha / r kept."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from holdfast.models.lora_layers import LoraLayer


def multiply_rank(model: Any, layers: Sequence[LoraLayer], factors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Exchange A and B of every layer for ones of `times` the rank, the same `times` in all; PEFT's settings follow.

    The parameters are new objects: an optimizer made before does not hold them. What PEFT saves afterwards is an
    ordinary adapter. With rsLoRA, s = lora_alpha / sqrt(r), lora_alpha grows by sqrt(times) and is no integer any more.

    Args:
        layers: all adapted modules.
        factors: layer name -> (A, B).
    """
    adapter = layers[0].adapter
    times = {factors[layer.name][0].shape[0] / layer.module.r[adapter] for layer in layers}
    if len(times) != 1 or not next(iter(times)).is_integer():
        raise ValueError(f"the rank must grow by one whole factor, found {sorted(times)}")
    factor = int(next(iter(times)))
    # A copy: the settings may be the very object that the caller will make other adapters from.
    config = copy.copy(model.peft_config[adapter])
    stretch = math.sqrt(factor) if config.use_rslora else factor
    config.r *= factor
    config.rank_pattern = {key: value * factor for key, value in (config.rank_pattern or {}).items()}
    config.lora_alpha *= stretch
    config.alpha_pattern = {key: value * stretch for key, value in (config.alpha_pattern or {}).items()}
    model.peft_config[adapter] = config
    for layer in layers:
        _exchange(layer, *factors[layer.name])
        layer.module.r[adapter] *= factor
        layer.module.lora_alpha[adapter] *= stretch


def _exchange(layer: LoraLayer, first: Tensor, second: Tensor) -> None:
    """New weights in the old modules: new modules would draw random numbers to fill them."""
    down, up = layer.module.lora_A[layer.adapter], layer.module.lora_B[layer.adapter]
    for module, value in ((down, first), (up, second)):
        old = module.weight
        module.weight = nn.Parameter(value.to(old.device, old.dtype).contiguous(), requires_grad=old.requires_grad)
    down.out_features = up.in_features = first.shape[0]
