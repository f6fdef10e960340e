"""Adapters on a base, not merged: switched off they give the base back, and the weights lie in memory once."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core.errors import UnsupportedError
from holdfast.models.adapter_limits import require_loadable
from holdfast.models.library_errors import one_line_errors
from holdfast.models.model_files import settings_in
from holdfast.models.redirects import ADAPTER_CONFIG

# Initialisations that leave the base as it is. The others (PiSSA, OLoRA, CorDA, LoftQ) subtract a part from it.
_PLAIN_STARTS = {None, True, False, "gaussian", "orthogonal", "eva"}


def adapter_settings_of(adapter: Path) -> dict[str, Any]:
    """The content of an adapter's configuration file."""
    return settings_in(adapter / ADAPTER_CONFIG)


def require_scorable(adapter: Path) -> None:
    """Refuse an adapter whose virtual tokens shift the positions that losses are read from.

    Raises:
        UnsupportedError: for prompt tuning, prefix tuning and their kin.
    """
    config = adapter_settings_of(adapter)
    if "num_virtual_tokens" in config or config.get("peft_type") == "ADAPTION_PROMPT":
        raise UnsupportedError(
            f"adapter {adapter} is a prompt-learning adapter ({config.get('peft_type')}), which is not supported",
            remedy="use an adapter on the weights, such as LoRA, or a full model",
        )


def leaves_base_alone(adapter: Path) -> bool:
    """Whether switching the adapter off gives its base back bit for bit.

    Trained biases overwrite the base's, some initialisations subtract from its weights, and replicated layers deepen
    it; all of that stays when the adapter is off.
    """
    config = adapter_settings_of(adapter)
    start = config.get("init_lora_weights")
    return (
        config.get("bias", "none") == "none"
        and not config.get("layer_replication")
        and (isinstance(start, (str, bool)) or start is None)
        and start in _PLAIN_STARTS
    )


def not_plain_lora(adapter: Path) -> str | None:
    """Why W + s * scaling * B A is not this adapter at strength s; None when it is."""
    config = adapter_settings_of(adapter)
    if config.get("peft_type") != "LORA":
        return f"it is {config.get('peft_type')}, not LoRA"
    for key, name in (
        ("use_dora", "DoRA, whose magnitudes do not scale"),
        ("modules_to_save", "modules trained in full (modules_to_save)"),
        ("trainable_token_indices", "trained tokens (trainable_token_indices)"),
        ("lora_bias", "a trained bias (lora_bias)"),
        ("layer_replication", "replicated layers (layer_replication)"),
    ):
        if config.get(key):
            return f"it has {name}"
    return None if leaves_base_alone(adapter) else "it changes the base's own weights or biases"


def attach(base: Any, adapters: Mapping[str, Path]) -> Any:
    """The base with every adapter by name, none merged, in evaluation mode; the first is active."""
    from peft import PeftModel

    model: Any = None
    for name, folder in adapters.items():
        require_loadable(folder, base if model is None else model)
        with one_line_errors(folder, "adapter"), warnings.catch_warnings():
            # PEFT only warns when weights are missing, and goes on with their initial values.
            warnings.filterwarnings("error", message=".*missing adapter keys.*")
            where = {"torch_device": str(base.device)}
            if model is None:
                model = PeftModel.from_pretrained(base, str(folder), adapter_name=name, **where)
            else:
                model.load_adapter(str(folder), adapter_name=name, **where)
    return model.eval()
