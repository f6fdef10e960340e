"""Which files of a model's folder loading opens, by name; `content.py` has the table of what counts and why.

transformers and PEFT follow what the configurations say. Most of it stays inside the folder and is hashed with it; what
would bring in a file, a module or a repository that no hash covers is refused by name before loading.
"""

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.core.errors import CheckpointError, UnsupportedError
from holdfast.models.library_errors import first_line

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
CODE = "*.py"
# The same weights once more, in a format that transformers does not read.
SECOND_COPIES = ["*/*.safetensors", "consolidated*.safetensors"]
# Beside the weights. Named one by one: a folder may also hold state of the training that made the model. The names
# of vocabularies are those of every tokenizer class of transformers.
DECISIVE = (
    CONFIG, "generation_config.json", "tokenizer.json", TOKENIZER_CONFIG, "special_tokens_map.json",
    "added_tokens.json", "vocab*.json", "*vocab.json", "vocab*.txt", "dict.txt", "merges.txt", "bpe.codes", "*.model",
    "*.spm", "*.tiktoken", "*.tokenizer", "tokenizer.model*", "tekken.json", "normalizer.json", "emoji.json",
    "word_*.json", "byte_maps.json", "chat_template.json", "*.jinja", "additional_chat_templates/*.jinja",
    "processor_config.json", "preprocessor_config.json",
)  # fmt: skip
# Where transformers finds files of these names it reads all *.safetensors of the folder through torch.distributed.
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_SHARD = re.compile(r"[\w.-]+\.safetensors", re.ASCII)
MAX_JSON = 2**26  # bytes; an index of 100,000 tensors has 10 MB

# Whatever their value: nothing that save_pretrained writes needs them.
NAMES_ANOTHER_FILE: dict[str, tuple[str, ...]] = {
    CONFIG: ("transformers_weights", "configuration_files"),
    TOKENIZER_CONFIG: (
        "fast_tokenizer_files", "tokenizer_file", "vocab_file", "merges_file", "spm_file",
        "init_inputs",  # arguments of the tokenizer's class, files among them
    ),
    ADAPTER_CONFIG: (
        "covariance_file", "prompt_tuning_init_state_dict_path", "tokenizer_name_or_path",
        "cache_file",  # CorDA: unpickled
        "adapters",  # X-LoRA: other adapters by path
        "megatron_config",  # PEFT imports the module that `megatron_core` names
    ),
}  # fmt: skip
# Attention and experts may be named by a hub repository, whose compiled code then runs.
_KERNELS = re.compile(r"_?(attn|experts)_implementation(_internal)?")
_PLACE = re.compile(r"(.+_)?(file|path|dir)")
_OWN_CLASS = re.compile(r"(?!\d)\w+(/\w+)*\.\w+", re.ASCII)  # of a Python file in the folder, or below it


def settings_in(path: Path) -> dict[str, Any]:
    try:
        size = path.stat().st_size
        value = None if size > MAX_JSON else json.loads(path.read_text(encoding="utf-8"))
        found = f"{size} bytes" if size > MAX_JSON else type(value).__name__
    except (OSError, ValueError, RecursionError) as error:
        value, found = None, first_line(error)
    if not isinstance(value, dict):
        what = f"{path}: expected a JSON object, found {found}"
        raise CheckpointError(what, remedy="restore the file as it was saved")
    return value


def weight_files(folder: Path) -> list[str]:
    """The weight files that transformers reads: one file, or an index and the shards it names.

    Where both are there it reads the one file; the index then counts beside it, its shards do not.
    """
    names = sorted(path.name for path in folder.iterdir() if require_regular(path))
    if distributed := [name for name in names if _DISTRIBUTED.fullmatch(name)]:
        what = f"{folder / distributed[0]} is part of a distributed checkpoint, which is read instead of {WEIGHTS}"
        raise CheckpointError(what, remedy="save the model with save_pretrained into an empty folder")
    if WEIGHTS in names:
        return [WEIGHTS, *([INDEX] if INDEX in names else [])]
    if INDEX in names:
        return [INDEX, *_shards(folder)]
    if not (others := [name for name in names if name.endswith(".safetensors")]):
        what = f"{folder} holds no weights: expected {WEIGHTS}, an index with shards or an adapter; no pickle is opened"
        raise UnsupportedError(what, remedy="name the folder that save_pretrained wrote; it writes safetensors")
    return others


def _shards(folder: Path) -> list[str]:
    placed = settings_in(folder / INDEX).get("weight_map")
    named = set(map(str, placed.values())) if isinstance(placed, dict) else set()
    outside = sorted(name for name in named if not _SHARD.fullmatch(name))
    missing = sorted(name for name in named if not (folder / name).is_file()) if not outside else []
    if outside or missing or not named:
        problem = f"the shard {missing[0]} is missing" if missing else "it names no shards"
        if outside:
            problem = f"{outside[0][:100]!r} is not the plain name of a safetensors file in this folder"
        raise CheckpointError(f"{folder / INDEX}: {problem}", remedy="restore the model's files")
    return sorted(named)


def decisive_files(folder: Path, *, trust_remote_code: bool) -> list[str]:
    """Everything but weights: configuration, tokenizer, templates; with trust every Python file, in subfolders too."""
    files = {path for pattern in DECISIVE for path in folder.glob(pattern)}
    files |= _code(folder) if trust_remote_code else set()
    return sorted(path.relative_to(folder).as_posix() for path in files if require_regular(path))


def require_regular(path: Path) -> bool:
    """Whether this is a file, or a link to one; neither a folder nor nothing is, and a pipe or a device is refused."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return stat.S_ISREG(mode)
    raise CheckpointError(f"{path} is no regular file", remedy="put the file itself into the model's folder")


def _code(folder: Path) -> set[Path]:
    files = set()
    for place, below, names in os.walk(folder):
        if linked := [name for name in below if Path(place, name).is_symlink()]:
            what = f"{Path(place, linked[0])} is a link to a folder, whose code would run without being hashed"
            raise CheckpointError(what, remedy="copy the code into the model's folder")
        files |= {Path(place, name) for name in names if name.endswith(".py")}
    return files


def require_no_redirects(folder: Path, *, trust_remote_code: bool) -> None:
    """Refuse a model or adapter folder whose files lead loading elsewhere."""
    for file, refused in NAMES_ANOTHER_FILE.items():
        path = folder / file
        if not require_regular(path):
            continue
        for key, value in _pairs(settings_in(path)):
            if key in refused and value not in (None, "", [], {}, ()):
                raise _refusal(path, key, "it makes loading read what no hash covers")
            if _KERNELS.fullmatch(key) and any("/" in text for text in _texts(value)):
                raise _refusal(path, key, "it names a repository whose code would run, in no hash")
            for name, place in _pairs(value) if key == "quantization_config" else ():
                if _PLACE.fullmatch(name) and isinstance(place, str) and place:
                    raise _refusal(path, f"quantization_config.{name}", "it names a file that no hash covers")
            for text in _texts(value) if key == "auto_map" and trust_remote_code else ():
                if "--" in text:
                    raise _refusal(path, key, f"{text[:100]!r} is code of another repository, at no pinned commit")
                if not _OWN_CLASS.fullmatch(text):
                    raise _refusal(path, key, f"{text[:100]!r} is not a class in a Python file of this folder")


def _refusal(path: Path, key: str, why: str) -> CheckpointError:
    remedy = f"remove the key {key}, or save the model with save_pretrained into a new folder"
    return CheckpointError(f"{path}: the key {key} is refused: {why}", remedy=remedy)


def _pairs(value: object) -> Iterator[tuple[str, object]]:
    """Every key with its value, at any depth: a composite model hands its text part's settings to the loader."""
    todo = [value]
    while todo:
        inner = todo.pop()
        if isinstance(inner, dict):
            yield from inner.items()
            todo += inner.values()
        elif isinstance(inner, list):
            todo += inner


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(inner)
