"""PEFT adapters on disk: what they rest on, what their settings say, and putting them on a base, merged or not."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.core.errors import CheckpointError, UnsupportedError
from holdfast.core.library_types import LanguageModel
from holdfast.models.library_errors import one_line_errors
from holdfast.models.limits import require_loadable
from holdfast.models.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, DECISIVE, require_no_redirects, settings_in
from holdfast.models.source import Source, file_of, folder_of, resolve, snapshot

MAX_ADAPTERS = 16  # on top of one another
# Initialisations that leave the base as it is. The others (PiSSA, OLoRA, CorDA, LoftQ) subtract a part from it.
_PLAIN_STARTS = {None, True, False, "gaussian", "orthogonal", "eva"}
_NOT_PLAIN = {
    "use_dora": "DoRA, whose magnitudes do not scale",
    "modules_to_save": "modules trained in full (modules_to_save)",
    "trainable_token_indices": "trained tokens (trainable_token_indices)",
    "lora_bias": "a trained bias (lora_bias)",
    "layer_replication": "replicated layers (layer_replication)",
}


class Lineage(NamedTuple):
    """What a reference stands for: a full model, and the adapters on it, the topmost first."""

    adapters: list[Path]
    base: Path
    named: str  # the full model's folder, or its hub id where the hub was asked for it


def lineage(
    ref: str | Path, revision: str | None, trust_remote_code: bool, base: str | Path | None = None, *,
    local_only: bool = False,
) -> Lineage:  # fmt: skip
    """Follow adapters down to their full model, all as local folders; nothing in them leads loading elsewhere.

    `base` is where the topmost adapter's base is, when it is not where the adapter says; `local_only`: see `resolve`.
    """
    adapters: list[Path] = []
    source = resolve(ref, revision, trust_remote_code, local_only)
    while (folder := adapter_folder(source)) is not None:
        require_no_redirects(folder, trust_remote_code=trust_remote_code)
        adapters.append(folder)
        if len(adapters) > MAX_ADAPTERS:
            raise _circle(adapters[0])
        below, below_revision = base_of(folder) if base is None else (base, None)
        base = None
        source = resolve(below, below_revision, trust_remote_code, local_only)
    full = folder_of(source, trust_remote_code=trust_remote_code)
    require_no_redirects(full, trust_remote_code=trust_remote_code)
    return Lineage(adapters, full, source.place)


def adapter_folder(source: Source) -> Path | None:
    """The local folder of a PEFT adapter with safetensors weights; None for a full model."""
    if file_of(source, ADAPTER_CONFIG) is None:
        return None
    folder = Path(source.place)
    if not folder.is_dir():
        folder = snapshot(source.place, source.revision, [ADAPTER_WEIGHTS, ADAPTER_CONFIG, *DECISIVE])
    if not (folder / ADAPTER_WEIGHTS).is_file():
        what = f"adapter {folder} has no {ADAPTER_WEIGHTS}; pickled weights are not opened"
        raise UnsupportedError(what, remedy="save it again with PEFT's save_pretrained (safe_serialization=True)")
    return folder


def base_of(adapter: Path) -> tuple[str, str | None]:
    """The base model a PEFT adapter names, and its revision."""
    named = _named_base(adapter)
    passed, below = {adapter.resolve()}, Path(named[0])
    while os.path.isfile(below / ADAPTER_CONFIG):  # noqa: PTH113  (False for a name too long for the system, too)
        if below.resolve() in passed:
            raise _circle(adapter)
        passed.add(below.resolve())
        below = Path(_named_base(below)[0])
    return named


def _named_base(adapter: Path) -> tuple[str, str | None]:
    config = adapter_settings_of(adapter)
    for key, kinds in (("base_model_name_or_path", str), ("revision", str | None)):
        if not isinstance(config.get(key), kinds):
            what = f"{adapter / ADAPTER_CONFIG}: expected a text under {key}, found {type(config.get(key)).__name__}"
            raise CheckpointError(what, remedy="restore the file from the run that saved the adapter")
    return config["base_model_name_or_path"], config.get("revision")


def _circle(adapter: Path) -> CheckpointError:
    what = f"adapter {adapter} rests on itself: following base_model_name_or_path never reaches a full model"
    return CheckpointError(what, remedy=f"name the adapter's base model in its {ADAPTER_CONFIG}")


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
    plain = isinstance(start, str | bool | None) and start in _PLAIN_STARTS
    return plain and config.get("bias", "none") == "none" and not config.get("layer_replication")


def not_plain_lora(adapter: Path) -> str | None:
    """Why W + s * scaling * B A is not this adapter at strength s; None when it is."""
    config = adapter_settings_of(adapter)
    if config.get("peft_type") != "LORA":
        return f"it is {config.get('peft_type')}, not LoRA"
    if more := [name for key, name in _NOT_PLAIN.items() if config.get(key)]:
        return f"it has {more[0]}"
    return None if leaves_base_alone(adapter) else "it changes the base's own weights or biases"


def load_adapter(model: LanguageModel, adapter: Path, **options: Any) -> LanguageModel:
    """The model with an adapter attached; one that carries adapters already gets it beside them."""
    from peft import PeftModel

    require_loadable(adapter, model)
    with one_line_errors(adapter, "adapter"), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        if isinstance(model, PeftModel):
            model.load_adapter(str(adapter), **options)
            return model
        return PeftModel.from_pretrained(model, str(adapter), **options)


def attach(base: LanguageModel, adapters: Mapping[str, Path]) -> LanguageModel:
    """The base with every adapter by name, none merged, in evaluation mode; the first is active."""
    model = base
    for name, folder in adapters.items():
        model = load_adapter(model, folder, adapter_name=name, torch_device=str(base.device))
    return model.eval()


def merge(base: LanguageModel, adapter: Path) -> LanguageModel:
    """Base + adapter as one model: W + scale * B A for LoRA."""
    model = load_adapter(base, adapter)
    if not hasattr(model, "merge_and_unload"):
        what = f"adapter {adapter}: {type(model).__name__} cannot be merged"
        raise UnsupportedError(what, remedy="use a LoRA adapter, or a full model")
    with one_line_errors(adapter, "adapter"):
        return model.merge_and_unload(safe_merge=True).eval()
