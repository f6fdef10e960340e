"""Keys in a model's own files that make loading open something else; each is refused by name before loading.

transformers and PEFT follow what `config.json`, `tokenizer_config.json` and `adapter_config.json` say. Most of it
stays inside the folder and is hashed with it; what is refused here would bring in a file, a module or a repository
that no hash covers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.core.errors import CheckpointError
from holdfast.models.model_files import CONFIG, TOKENIZER_CONFIG, require_regular, settings_in

ADAPTER_CONFIG = "adapter_config.json"

# Whatever their value: nothing that save_pretrained writes needs them.
NAMES_ANOTHER_FILE: dict[str, tuple[str, ...]] = {
    CONFIG: ("transformers_weights", "configuration_files"),
    TOKENIZER_CONFIG: (
        "fast_tokenizer_files",
        "tokenizer_file",
        "vocab_file",
        "merges_file",
        "spm_file",
        "init_inputs",
    ),
    ADAPTER_CONFIG: (
        "cache_file",  # CorDA: unpickled
        "covariance_file",
        "prompt_tuning_init_state_dict_path",
        "tokenizer_name_or_path",
        "adapters",  # X-LoRA: other adapters by path
        "megatron_config",  # PEFT imports the module that `megatron_core` names
    ),
}
# Attention and experts may be named by a hub repository, whose compiled code then runs.
_KERNELS = re.compile(r"_?(attn|experts)_implementation(_internal)?")
_PLACE = re.compile(r"(.+_)?(file|path|dir)")
_OWN_CLASS = re.compile(r"(?!\d)\w+(/\w+)*\.\w+", re.ASCII)


def require_no_redirects(folder: Path, *, trust_remote_code: bool) -> None:
    """Refuse a model or adapter folder whose files lead loading elsewhere.

    Args:
        trust_remote_code: whether the repository's code may run. Without it `auto_map` is not followed.

    Raises:
        CheckpointError: naming the file and the key.
    """
    for name, refused in NAMES_ANOTHER_FILE.items():
        path = folder / name
        if not require_regular(path):
            continue
        for key, value in _pairs(settings_in(path)):
            if key in refused and value not in (None, "", [], {}, ()):
                raise _refusal(path, key, "it makes loading read what no hash covers")
            if _KERNELS.fullmatch(key) and any("/" in text for text in _texts(value)):
                raise _refusal(path, key, "it names a repository whose code would run, in no hash")
            if key == "quantization_config":
                _require_no_places(path, value)
            if key == "auto_map" and trust_remote_code:
                _require_own_code(path, value)


def _require_no_places(path: Path, value: Any) -> None:
    for key, inner in _pairs(value):
        if _PLACE.fullmatch(key) and isinstance(inner, str) and inner:
            raise _refusal(path, f"quantization_config.{key}", "it names a file that no hash covers")


def _require_own_code(path: Path, value: Any) -> None:
    """Every class of `auto_map` lies in a Python file of this folder: `module.Class` or `folder/module.Class`."""
    for text in _texts(value):
        if "--" in text:
            raise _refusal(path, "auto_map", f"{text[:100]!r} is code of another repository, at no pinned commit")
        if not _OWN_CLASS.fullmatch(text):
            raise _refusal(path, "auto_map", f"{text[:100]!r} is not a class in a Python file of this folder")


def _refusal(path: Path, key: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: the key {key} is refused: {why}",
        remedy=f"remove the key {key}, or save the model with save_pretrained into a new folder",
    )


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key with its value, at any depth: a composite model hands its text part's settings to the loader."""
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            yield from one.items()
            todo += one.values()
        elif isinstance(one, list):
            todo += one


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(inner)
