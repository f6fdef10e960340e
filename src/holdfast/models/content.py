"""What a model on disk is: the sha256 of every file that loading it opens. One module owns that question.

| file or key | |
|---|---|
| `model.safetensors`; else `model.safetensors.index.json` and its shards | counted; where both are there the one file is read, and the index counts |
| other `*.safetensors`, where neither is there | counted: a folder that only some classes load |
| shard names that are no plain names in the folder | refused: they lead outside |
| `shard-*-model-*-of-*.safetensors` | refused: a distributed checkpoint is read instead of the weights |
| `*.bin`, `*.pt`, `*.gguf`, `consolidated*.safetensors`, subfolders' weights | ignored: never opened, since only safetensors under the names above are |
| `config.json`, `generation_config.json`, processor configurations | counted |
| `transformers_weights`, `configuration_files` | refused: another file is read; `adapter_model.bin` would be unpickled |
| `attn_implementation`, `experts_implementation` naming a repository | refused: its compiled code would run |
| `quantization_config` naming a file | refused; the rest of it counts with `config.json` |
| tokenizer: `tokenizer.json`, `tokenizer_config.json`, added and special tokens, every class's vocabularies | counted |
| `fast_tokenizer_files`, `tokenizer_file`, `vocab_file`, `merges_file`, `spm_file`, `init_inputs` | refused |
| chat templates: `*.jinja`, `additional_chat_templates/`, `chat_template.json` | counted |
| `auto_map` without trust_remote_code | ignored: not followed |
| `auto_map` with trust_remote_code | `module.Class` of the folder: every `*.py`, in subfolders too, counted; `other/repo--x.Y` refused |
| code behind a link to a folder, with trust_remote_code | refused |
| `adapter_config.json` | counted, without the two values that say where the base is |
| `adapter_model.safetensors` | counted; `adapter_model.bin` ignored, since PEFT reads the former |
| the base of an adapter, and adapters below it | counted as `base/...`; an adapter that rests on itself refused |
| `cache_file`, `covariance_file`, `tokenizer_name_or_path`, `prompt_tuning_init_state_dict_path`, `adapters`, `megatron_config` | refused: PEFT opens or imports what they name |
| `auto_mapping`, `modules_to_save`, `exclude_modules`, `eva_config`, `loftq_config` | counted with their file: they open nothing |
| links | counted as what they lead to, in the hub cache or elsewhere: what loading reads is what is hashed |
| pipes, sockets, devices under a counted name | refused |
| README, training state, logs | ignored: they compute nothing |

`adapter_config.json` is hashed with the values of `base_model_name_or_path` and `revision` cut out of its bytes: the
base is bound by its content, and moving it changes nothing. Every other byte of the file counts.

A folder may change after it was hashed: `require_unchanged` reads every file again, after measuring. A file that is
swapped and swapped back in between is not noticed. No torch is imported here.
"""  # noqa: E501  (a table)

import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from holdfast.core.errors import CheckpointError, HoldfastError
from holdfast.core.hashing import sha256_file, sha256_lines
from holdfast.models.adapter import lineage
from holdfast.models.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, decisive_files, weight_files

LARGE = 2**24  # bytes; hashing less takes no time
_MOVABLE = tuple(
    re.compile(rb'"%s"\s*:\s*("(?:[^"\\]|\\.)*"|null)' % name) for name in (b"base_model_name_or_path", b"revision")
)


@dataclass(frozen=True, slots=True)
class ModelContent:
    """One hash for all files of a model, and one for each."""

    ref: str  # the reference that was given, with `revision`, `trust_remote_code` and `base` as they were
    sha256: str  # of the lines `name sha256`, sorted by name
    files: dict[str, str]  # name to sha256
    revision: str | None = None
    trust_remote_code: bool = False
    base: str | None = None


def content_of(
    ref: str | Path, *, revision: str | None = None, trust_remote_code: bool = False, base: str | Path | None = None,
    local_only: bool = False,
) -> ModelContent:  # fmt: skip
    """Hash the files of a model or adapter; `local_only` refuses a hub model that is not in the local cache."""
    origin = lineage(ref, revision, trust_remote_code, base, local_only=local_only)
    files: dict[str, str] = {}
    for depth, folder in enumerate([*origin.adapters, origin.base]):
        names = decisive_files(folder, trust_remote_code=trust_remote_code)
        if folder is origin.base:
            hashed = _hashed(folder, [*weight_files(folder), *names])
        else:
            hashed = _hashed(folder, [ADAPTER_WEIGHTS, *names])
            hashed[ADAPTER_CONFIG] = _adapter_config_sha256(folder / ADAPTER_CONFIG)
        files |= {"base/" * depth + name: digest for name, digest in hashed.items()}
    whole = sha256_lines(f"{name} {files[name]}" for name in sorted(files))
    return ModelContent(str(ref), whole, files, revision, trust_remote_code, None if base is None else str(base))


def require_unchanged(contents: Iterable[ModelContent]) -> None:
    """Hash models again, every file read anew, and refuse what differs: for the end of a measurement."""
    forget_hashes()
    for before in contents:
        asked: dict[str, Any] = {key: getattr(before, key) for key in ("revision", "trust_remote_code", "base")}
        try:
            now = content_of(before.ref, **asked).files
        except HoldfastError as error:
            raise _changed(before.ref, error.what) from error
        if names := sorted(name for name in {*before.files, *now} if before.files.get(name) != now.get(name)):
            how = "added" if names[0] not in before.files else "changed" if names[0] in now else "removed"
            raise _changed(before.ref, f"{names[0]} was {how}")


def _changed(ref: str, what: str) -> CheckpointError:
    problem = f"model {ref!r} is no longer what was hashed before it was measured: {what}"
    return CheckpointError(problem, remedy="measure again, and leave the model's files alone meanwhile")


def _hashed(folder: Path, names: list[str]) -> dict[str, str]:
    # hashlib releases the interpreter lock on large buffers: threads hash files side by side.
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(lambda name: _file_sha256(folder / name), names), strict=True))


def _file_sha256(path: Path) -> str:
    """sha256 of a file; a large one is read once a process while the file system calls it unchanged.

    An adapter's base is hashed for itself and again below the adapter.
    """
    try:
        found = path.stat()
        if found.st_size < LARGE:
            return sha256_file(path)
        return _large_sha256(path.resolve(), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror}"
        raise CheckpointError(what, remedy="restore the file, or its permissions") from error


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
        if len(pattern.findall(text)) == 1:
            text = pattern.sub(b"", text)
    return sha256(text).hexdigest()
