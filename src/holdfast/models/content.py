"""What a model on disk is: the sha256 of every file that decides what it computes.

Counted are weights, configuration, tokenizer, chat templates and, where it may run, the repository's code; not the
README and not training state. An adapter is its own files and its base's, the latter named `base/...`.

An adapter names its base by path, so `adapter_config.json` is hashed with the values of `base_model_name_or_path` and
`revision` cut out of its bytes: the base is bound by its content, and moving it changes nothing. Every other byte of
the file counts.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from holdfast.core.errors import CheckpointError, UnsupportedError
from holdfast.core.files import read_json
from holdfast.core.hashing import sha256_file, sha256_lines
from holdfast.models.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Source, adapter_folder, base_of

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
# The same weights once more, in a format that transformers does not read.
SECOND_COPIES = ["*/*.safetensors", "consolidated*.safetensors"]
LARGE = 2**24  # bytes; hashing less takes no time
# Beside the weights. Named one by one: a folder may also hold state of the training that made the model.
DECISIVE = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "tekken.json",
    "chat_template.json", "*.jinja", "additional_chat_templates/*.jinja", "processor_config.json",
    "preprocessor_config.json",
)  # fmt: skip
_MOVABLE = tuple(
    re.compile(rb'"%s"\s*:\s*("(?:[^"\\]|\\.)*"|null)' % name) for name in (b"base_model_name_or_path", b"revision")
)


@dataclass(frozen=True, slots=True)
class ModelContent:
    """The content of a model: one hash for all, and one for each file.

    Attributes:
        ref: the reference that was given.
        sha256: of the lines `name sha256`, sorted by name.
        files: name to sha256.
    """

    ref: str
    sha256: str
    files: dict[str, str]


def content_of(
    ref: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    base: str | Path | None = None,
) -> ModelContent:
    """Hash the files of a model or adapter.

    Args:
        ref: hub id, local folder, PEFT adapter (folder or hub id), or `embedded`.
        revision: commit, tag or branch of a hub id.
        trust_remote_code: count the repository's Python files too, since they run.
        base: where an adapter's base is, when it is not where the adapter says.

    Raises:
        ConfigError: the reference cannot be resolved.
        UnsupportedError: there are no safetensors weights.
        CheckpointError: the index names a file that is missing.
    """
    files = _files_of(ref, revision, trust_remote_code, base)
    return ModelContent(str(ref), sha256_lines(f"{name} {files[name]}" for name in sorted(files)), files)


def _files_of(
    ref: str | Path, revision: str | None, trust_remote_code: bool, base: str | Path | None
) -> dict[str, str]:
    from holdfast.models.handle import resolve

    source = resolve(ref, revision, trust_remote_code)
    adapter = adapter_folder(source)
    folder = adapter or _full_folder(source, trust_remote_code)
    names = _decisive(folder, trust_remote_code)
    if adapter is None:
        return _hashed(folder, [*_weights(folder), *names])
    files = _hashed(folder, [ADAPTER_WEIGHTS, *names])
    files[ADAPTER_CONFIG] = _adapter_config_sha256(folder / ADAPTER_CONFIG)
    named, named_revision = base_of(folder)
    place, place_revision = (named, named_revision) if base is None else (base, None)
    below = _files_of(place, place_revision, trust_remote_code, None)
    return files | {f"base/{name}": digest for name, digest in below.items()}


def _full_folder(source: Source, trust_remote_code: bool) -> Path:
    """The local folder of a full model; from the hub, with every file that counts downloaded."""
    from huggingface_hub import snapshot_download

    from holdfast.models.library_errors import one_line_errors

    folder = Path(source.place)
    if folder.is_dir():
        return folder
    patterns = ["*.safetensors", INDEX, *DECISIVE, *(["*.py"] if trust_remote_code else [])]
    with one_line_errors(source.place, "model"):
        found: Any = snapshot_download(
            source.place, revision=source.revision, allow_patterns=patterns, ignore_patterns=SECOND_COPIES
        )
    return Path(str(found))


def _weights(folder: Path) -> list[str]:
    """The weight files that transformers reads: one file, or an index and the shards it names."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        placed = index.get("weight_map") if isinstance(index, dict) else None
        shards = sorted({str(name) for name in placed.values()}) if isinstance(placed, dict) else []
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing or not shards:
            raise CheckpointError(
                f"{folder / INDEX}: {f'the shard {missing[0]} is missing' if missing else 'it names no shards'}",
                remedy="restore the model's files",
            )
        return [INDEX, *shards]
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if not others:
        raise UnsupportedError(
            f"{folder} holds no weights: expected {WEIGHTS}, an index with shards, or an adapter",
            remedy="name the folder that save_pretrained wrote",
        )
    return others


def _decisive(folder: Path, trust_remote_code: bool) -> list[str]:
    patterns = [*DECISIVE, "*.py"] if trust_remote_code else DECISIVE
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _hashed(folder: Path, names: list[str]) -> dict[str, str]:
    # hashlib releases the interpreter lock on large buffers: threads hash files side by side.
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(lambda name: _file_sha256(folder / name), names), strict=True))


def _file_sha256(path: Path) -> str:
    """sha256 of a file; a large one is read once a process while the file system calls it unchanged.

    An adapter's base is hashed for itself and again below the adapter.
    """
    found = path.stat()
    if found.st_size < LARGE:
        return sha256_file(path)
    return _large_sha256(path.resolve(), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@lru_cache(maxsize=1024)
def _large_sha256(path: Path, *_: int) -> str:
    return sha256_file(path)


def forget_hashes() -> None:
    """Read every file again from here on: for a verification, which trusts no time stamp from before it."""
    _large_sha256.cache_clear()


def _adapter_config_sha256(path: Path) -> str:
    """sha256 of the bytes without the values that say where the base is; a key that occurs twice is left in."""
    text = path.read_bytes()
    for pattern in _MOVABLE:
        found = pattern.findall(text)
        if len(found) == 1:
            text = pattern.sub(b"", text)
    return sha256(text).hexdigest()
