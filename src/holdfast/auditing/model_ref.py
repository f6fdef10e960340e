"""What `before` and `after` are: a full model, an adapter on a base, or a model in memory; and what they share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.core.hashing import sha256_json
from holdfast.models.adapter import adapter_folder, base_of
from holdfast.models.content import ModelContent, content_of
from holdfast.models.fingerprint import adapter_fingerprint, model_fingerprint
from holdfast.models.source import resolve
from holdfast.models.unmerged import leaves_base_alone, require_scorable
from holdfast.scoring.completion import causal_lm

Mode = Literal["one model", "adapter", "two adapters", "two models"]


@dataclass(frozen=True)
class ModelRef:
    """One of the two models.

    Attributes:
        ref: as the user named it.
        revision: of a hub id.
        sha256: of its files, or of its tensors when it is in memory.
        base: the full model to load, with `base_revision`; of an adapter, the model it names.
        adapter: the adapter's folder; None for a full model.
        loaded: the model itself, when it came in memory.
        content: of its files; None when it came in memory.
    """

    ref: str
    sha256: str
    revision: str | None = None
    base: str | Path = ""
    base_revision: str | None = None
    adapter: Path | None = None
    loaded: Any = None
    content: ModelContent | None = None


def model_ref(model: Any, revision: str | None, *, trust_remote_code: bool) -> ModelRef:
    """Find out what a reference or a model in memory is; no weights are loaded."""
    if not isinstance(model, (str, Path)):
        return _in_memory(model)
    content = content_of(model, revision=revision, trust_remote_code=trust_remote_code)
    adapter = adapter_folder(resolve(model, revision, trust_remote_code))
    if adapter is None:
        return ModelRef(str(model), content.sha256, revision, model, revision, content=content)
    require_scorable(adapter)
    return ModelRef(str(model), content.sha256, revision, *base_of(adapter), adapter, content=content)


def _in_memory(model: Any) -> ModelRef:
    if not hasattr(model, "state_dict") or not hasattr(model, "get_output_embeddings"):
        raise ConfigError(
            f"a model of type {type(model).__name__}, expected a reference or a causal language model",
            remedy="give a hub id, a folder, an adapter, or a loaded transformers or PEFT model",
        )
    if any(getattr(config, "is_prompt_learning", False) for config in getattr(model, "peft_config", {}).values()):
        raise UnsupportedError(
            "a prompt-learning adapter: its virtual tokens shift the positions that losses are read from",
            remedy="use an adapter on the weights, such as LoRA, or a full model",
        )
    peft = hasattr(model, "get_base_model")
    sha256 = sha256_json([model_fingerprint(model), adapter_fingerprint(model) if peft else None])
    name = getattr(causal_lm(model).config, "_name_or_path", "") or type(causal_lm(model)).__name__
    return ModelRef(f"{name} (in memory)", sha256, loaded=model)


def mode_of(before: ModelRef, after: ModelRef, *, trust_remote_code: bool) -> Mode:
    """How few weights are enough: one model, one base with adapters switched, or two models."""
    if before.loaded is not None and after.loaded is not None:
        if before.loaded is after.loaded:
            return "one model"
        # PEFT puts its layers into the base itself, so a base that an adapter was put on is that adapter's model.
        return "adapter" if causal_lm(before.loaded) is causal_lm(after.loaded) else "two models"
    if before.loaded is not None or after.loaded is not None:
        return "two models"
    if before.sha256 == after.sha256:
        return "one model"
    adapters = [side.adapter for side in (before, after) if side.adapter is not None]
    if not adapters or not all(map(leaves_base_alone, adapters)) or not _one_base(before, after, trust_remote_code):
        return "two models"
    return "adapter" if len(adapters) == 1 else "two adapters"


def stacked(lower: ModelRef, upper: ModelRef, *, trust_remote_code: bool) -> ModelRef:
    """`lower` as one merged model where `upper` is an adapter that was trained on top of it, else as it is."""
    if lower.adapter is None or upper.adapter is None:
        return lower
    merged = replace(lower, base=lower.ref, base_revision=lower.revision, adapter=None)
    return merged if _place(merged, trust_remote_code) == _place(upper, trust_remote_code) else lower


def _one_base(before: ModelRef, after: ModelRef, trust_remote_code: bool) -> bool:
    """Whether both rest on the same base, by its place or by its content."""
    if _place(before, trust_remote_code) == _place(after, trust_remote_code):
        return True
    first, second = (
        content_of(side.base, revision=side.base_revision, trust_remote_code=trust_remote_code)
        for side in (before, after)
    )
    return first.sha256 == second.sha256


def _place(side: ModelRef, trust_remote_code: bool) -> tuple[str, str | None]:
    source = resolve(side.base, side.base_revision, trust_remote_code)
    folder = Path(source.place)
    return (str(folder.resolve()) if folder.is_dir() else source.place), source.revision
