"""LoRA on layers that the model does not have: refused with the names it has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from holdfast.core.errors import ConfigError

KEY = "target_modules"


@contextmanager
def named_targets(model: Any) -> Iterator[None]:
    """Around what attaches an adapter: PEFT's complaint about `target_modules` becomes a refusal.

    Raises:
        ConfigError: with the names of the model's linear layers.
    """
    try:
        yield
    except ValueError as error:
        said = str(error).strip().split("\n", 1)[0]
        if KEY not in said.lower().replace(" ", "_"):
            raise
        names = sorted({name.rpartition(".")[2] for name in _linear_layers(model)})
        raise ConfigError(
            f"lora.{KEY}: {said[:200]}",
            remedy=f"name some of the model's linear layers: {', '.join(names) or 'it has none that are named'}",
        ) from error


def _linear_layers(model: Any) -> list[str]:
    if not isinstance(model, torch.nn.Module):
        return []
    return [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
