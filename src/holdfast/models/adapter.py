"""PEFT adapters on disk: where their base is named, and merging them into it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.core.errors import CheckpointError, UnsupportedError
from holdfast.core.files import read_json
from holdfast.models.library_errors import one_line_errors

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


class Source(NamedTuple):
    """Where a model is: a local folder, or a hub id with what to ask the hub for."""

    place: str
    revision: str | None = None


def adapter_folder(source: Source) -> Path | None:
    """The local folder of a PEFT adapter with safetensors weights; None for a full model."""
    from huggingface_hub import snapshot_download
    from transformers.utils.peft_utils import find_adapter_config_file

    folder = Path(source.place)
    if not folder.is_dir():
        with one_line_errors(source.place, "adapter"):
            if find_adapter_config_file(source.place, revision=source.revision) is None:
                return None
            patterns = [ADAPTER_WEIGHTS, "*.json", "*.jinja", "*.model"]
            found = snapshot_download(source.place, revision=source.revision, allow_patterns=patterns)
            folder = Path(str(found))
    if not (folder / ADAPTER_CONFIG).is_file():
        return None
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise UnsupportedError(
            f"adapter {folder} has no {ADAPTER_WEIGHTS}; pickled weights are not opened",
            remedy="save it again with PEFT's save_pretrained (safe_serialization=True)",
        )
    return folder


def base_of(adapter: Path) -> tuple[str, str | None]:
    """The base model a PEFT adapter names, and its revision."""
    path = adapter / ADAPTER_CONFIG
    config = read_json(path)
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not isinstance(base, str):
        raise CheckpointError(
            f"{path}: expected a text under base_model_name_or_path, found {type(base).__name__}",
            remedy="restore the file from the run that saved the adapter",
        )
    return base, config.get("revision")


def merge(base: Any, adapter: Path) -> Any:
    """Base + adapter as one model: W + scale * B A for LoRA."""
    from peft import PeftModel

    with one_line_errors(adapter, "adapter"), warnings.catch_warnings():
        # PEFT only warns when weights are missing, and goes on with their initial values.
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        model = PeftModel.from_pretrained(base, str(adapter))
        if not hasattr(model, "merge_and_unload"):
            raise UnsupportedError(
                f"adapter {adapter}: {type(model).__name__} cannot be merged",
                remedy="use a LoRA adapter, or a full model",
            )
        return model.merge_and_unload(safe_merge=True).eval()
