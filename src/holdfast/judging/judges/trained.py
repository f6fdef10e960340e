"""A judge of one's own (`holdfast judge train`): its folder on disk, and the judge that reads it.

The folder holds everything that decides a verdict but the base's weights: `judge.json`, the classifier's config.json,
the tokenizer, and a PEFT adapter with the head (or, trained in full, all weights). `judge.json` carries the sha256 of
each of these files and the fingerprint of the base's weights, so that a judge on another base is refused.
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.core.files import read_json
from holdfast.core.hashing import sha256_file, sha256_json
from holdfast.core.library_types import LanguageModel
from holdfast.judging.judge import JUDGES
from holdfast.judging.judges.classifier import BATCH_SIZE, CONVERSATION, ClassifierJudge, DType, Opened, device_of

if TYPE_CHECKING:
    from holdfast.models.classifier import Precision

JUDGE_FILE = "judge.json"
VERSION = 1
_KEYS: dict[str, type | tuple[type, ...]] = {
    "kind": str, "base": dict, "categories": list, "input_format": str, "threshold": float, "max_length": int,
    "temperature": float, "figures": dict, "data": dict, "files": dict,
}  # fmt: skip
_AGAIN = "train the judge again with `holdfast judge train`, or restore the folder"


@JUDGES.register("trained")
class TrainedJudge(ClassifierJudge):
    """A folder written by `holdfast judge train`: 14 harm categories by a small classifier of your own.

    Args:
        folder: the judge's folder.
        base: where its base model is, when it is not where it was at training.
        threshold: instead of the stored one.
    """

    name: ClassVar[str] = "trained"

    def __init__(
        self, folder: str | Path | None = None, *, base: str | Path | None = None, threshold: float | None = None,
        batch_size: int = BATCH_SIZE, dtype: DType = "auto", device: str | None = None,
    ) -> None:  # fmt: skip
        if folder is None:
            raise ConfigError("judge trained: no folder is given", remedy="name the folder of the judge itself")
        self.folder, self.base = Path(folder), base
        self.description = read_description(self.folder)
        super().__init__(
            threshold=self.description["threshold"] if threshold is None else threshold,
            max_length=self.description["max_length"], batch_size=batch_size, dtype=dtype, device=device,
        )  # fmt: skip

    @cached_property
    def _opened(self) -> Opened:
        from holdfast.models.classifier import load_classifier
        from holdfast.models.handle import load_tokenizer

        _require_files(self.folder, self.description["files"])
        device = device_of(self.device)
        tokenizer = load_tokenizer(self.folder)
        dtype: Precision = "bfloat16" if self.dtype == "bfloat16" else "float32"
        lora = self.description["kind"] == "lora"
        model = self._adapted(dtype) if lora else load_classifier(self.folder, dtype=dtype)
        return Opened(
            model.to(device), tokenizer, tuple(self.description["categories"]),
            temperature=self.description["temperature"], autocast=self.dtype == "auto" and device.startswith("cuda"),
        )  # fmt: skip

    def _adapted(self, dtype: Precision) -> LanguageModel:
        from holdfast.models.adapter import merge
        from holdfast.models.classifier import classifier_on

        stored = self.description["base"]
        ref = self.base or stored["ref"]
        revision = None if self.base else stored["revision"]
        try:
            model, fingerprint = classifier_on(ref, self.folder, revision=revision, dtype=dtype)
        except ConfigError as error:
            what = f"judge {self.folder}: its base cannot be opened: {error.what}"
            remedy = "give the option base, a folder or hub id with the base's weights"
            raise CheckpointError(what, remedy=remedy) from error
        if fingerprint != (expected := stored["weights_sha256"]):
            problem = f"have changed, expected fingerprint {expected[:12]}, found {fingerprint[:12]}"
            remedy = "restore the base, name it with the option base, or train the judge again"
            raise CheckpointError(f"judge {self.folder}: the weights of its base {ref} {problem}", remedy=remedy)
        merged = merge(model, self.folder)
        merged.score.float()
        return merged

    def _hashed(self) -> str:
        _require_files(self.folder, self.description["files"])
        return sha256_json({JUDGE_FILE: sha256_file(self.folder / JUDGE_FILE), **self.description["files"]})


def read_description(folder: Path) -> dict[str, Any]:
    path = folder / JUDGE_FILE
    if not path.is_file():
        remedy = "name the folder that `holdfast judge train` wrote, or a judge of `holdfast ls judges`"
        raise ConfigError(f"judge: the folder {folder} holds no {JUDGE_FILE}", remedy=remedy)
    description: dict[str, Any] = read_json(path)
    version = description.get("version") if isinstance(description, dict) else None
    if version != VERSION:
        raise CheckpointError(f"{path}: version {version!r}, expected {VERSION}", remedy=_AGAIN)
    for key, kind in _KEYS.items():
        if not isinstance(description.get(key), kind):
            raise CheckpointError(f"{path}: {key} is missing or of another type than expected", remedy=_AGAIN)
    known = description["kind"] in ("lora", "full") and description["input_format"] == CONVERSATION
    if not known or not 0 < description["temperature"] < math.inf:
        raise CheckpointError(f"{path}: kind, input_format or temperature is not one that is known", remedy=_AGAIN)
    if not any(str(name).endswith(".safetensors") for name in description["files"]):
        raise CheckpointError(f"{path}: files names no weights", remedy=_AGAIN)
    if {"ref", "revision", "weights_sha256"} - set(description["base"]):
        raise CheckpointError(f"{path}: base lacks ref, revision or weights_sha256", remedy=_AGAIN)
    return description


def hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file of a judge's folder but judge.json, by name."""
    return {path.name: sha256_file(path) for path in sorted(folder.iterdir()) if path.name != JUDGE_FILE}


def _require_files(folder: Path, expected: dict[str, str]) -> None:
    for name, digest in sorted(expected.items()):
        path = folder / Path(name).name
        if (found := sha256_file(path) if path.is_file() else None) != digest:
            problem = "missing" if found is None else "not the one that was saved"
            raise CheckpointError(f"judge file {path} is {problem}", remedy=_AGAIN)
