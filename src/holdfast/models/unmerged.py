"""Adapters on a base, not merged: switched off they give the base back, and the weights lie in memory once.

Merging would round W + s B A to the base's dtype, and a small update may be lost in bfloat16.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.models.adapter import adapter_folder, base_of, load_adapter
from holdfast.models.handle import check_vocabulary, load_model, load_tokenizer, require_device
from holdfast.models.model_files import ADAPTER_CONFIG, settings_in
from holdfast.models.source import resolve

# Initialisations that leave the base as it is. The others (PiSSA, OLoRA, CorDA, LoftQ) subtract a part from it.
_PLAIN_STARTS = {None, True, False, "gaussian", "orthogonal", "eva"}
_NOT_PLAIN = {
    "use_dora": "DoRA, whose magnitudes do not scale",
    "modules_to_save": "modules trained in full (modules_to_save)",
    "trainable_token_indices": "trained tokens (trainable_token_indices)",
    "lora_bias": "a trained bias (lora_bias)",
    "layer_replication": "replicated layers (layer_replication)",
}
_SHAPE = ("r", "lora_alpha", "lora_dropout", "target_modules")


def adapter_settings_of(adapter: Path) -> dict[str, Any]:
    return settings_in(adapter / ADAPTER_CONFIG)


def require_scorable(adapter: Path) -> None:
    """Refuse an adapter whose virtual tokens shift the positions that losses are read from."""
    config = adapter_settings_of(adapter)
    if "num_virtual_tokens" in config or config.get("peft_type") == "ADAPTION_PROMPT":
        what = f"adapter {adapter} is a prompt-learning adapter ({config.get('peft_type')}), which is not supported"
        raise UnsupportedError(what, remedy="use an adapter on the weights, such as LoRA, or a full model")


def leaves_base_alone(adapter: Path) -> bool:
    """Whether switching the adapter off gives its base back bit for bit.

    Trained biases overwrite the base's, some initialisations subtract from its weights, and replicated layers deepen
    it; all of that stays when the adapter is off.
    """
    config = adapter_settings_of(adapter)
    start = config.get("init_lora_weights")
    plain = (isinstance(start, (str, bool)) or start is None) and start in _PLAIN_STARTS
    return plain and config.get("bias", "none") == "none" and not config.get("layer_replication")


def not_plain_lora(adapter: Path) -> str | None:
    """Why W + s * scaling * B A is not this adapter at strength s; None when it is."""
    config = adapter_settings_of(adapter)
    if config.get("peft_type") != "LORA":
        return f"it is {config.get('peft_type')}, not LoRA"
    if more := [name for key, name in _NOT_PLAIN.items() if config.get(key)]:
        return f"it has {more[0]}"
    return None if leaves_base_alone(adapter) else "it changes the base's own weights or biases"


def attach(base: Any, adapters: Mapping[str, Path]) -> Any:
    """The base with every adapter by name, none merged, in evaluation mode; the first is active."""
    model = base
    for name, folder in adapters.items():
        model = load_adapter(model, folder, adapter_name=name, torch_device=str(base.device))
    return model.eval()


def load_unmerged(
    ref: str | Path, *, revision: str | None = None, dtype: str = "auto", device: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """Model and tokenizer as deployed, in evaluation mode; an adapter stays beside its base, which may be one too."""
    place = require_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    options: dict[str, Any] = {"dtype": dtype, "device": place, "trust_remote_code": trust_remote_code}
    tokenizer = load_tokenizer(ref, revision=revision, trust_remote_code=trust_remote_code)
    if (folder := adapter_folder(resolve(ref, revision, trust_remote_code))) is None:
        model = load_model(ref, revision=revision, **options)
    else:
        require_scorable(folder)
        base, base_revision = base_of(folder)
        model = attach(load_model(base, revision=base_revision, **options), {"default": folder})
    check_vocabulary(model, tokenizer)
    return model, tokenizer


def load_adapter_pair(
    ref: str | Path, wanted: Any, *, revision: str | None = None, trust_remote_code: bool = False, **options: Any
) -> tuple[Any, Any]:
    """The base with its LoRA adapter attached to be trained further, and the tokenizer.

    theta_0 is base + adapter. The adapter's own shape must be the run's: it cannot change while it is trained.
    """
    if (folder := adapter_folder(resolve(ref, revision, trust_remote_code))) is None:
        what = f"model {str(ref)!r} is not an adapter, so there is none to continue"
        raise ConfigError(what, remedy="use adapter_policy: merge, or name an adapter as the model")
    if (more := not_plain_lora(folder)) is not None:
        what = f"adapter {folder} cannot be continued: {more}"
        raise UnsupportedError(what, remedy="use adapter_policy: merge, which takes any adapter on the weights")
    base, base_revision = base_of(folder)
    model = load_model(base, revision=base_revision, trust_remote_code=trust_remote_code, **options)
    model = load_adapter(model, folder, is_trainable=True)
    _require_shape(model.peft_config[model.active_adapter], wanted, folder)
    tokenizer = load_tokenizer(ref, revision=revision, trust_remote_code=trust_remote_code)
    check_vocabulary(model, tokenizer)
    return model, tokenizer


def _require_shape(stored: Any, wanted: Any, folder: Path) -> None:
    def plain(value: Any) -> Any:
        return sorted(value) if isinstance(value, set | list | tuple) else value

    for name in _SHAPE:
        has, asked = plain(getattr(stored, name, None)), plain(getattr(wanted, name, None))
        if has != asked and not (name == "target_modules" and asked == "all-linear"):
            raise ConfigError(
                f"adapter {folder}: its {name} is {has}, the run's lora block says {asked}",
                remedy="a continued adapter keeps its shape: write the same lora block, or use adapter_policy: merge",
            )
