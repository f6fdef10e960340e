"""What `before` and `after` are: a full model, an adapter on a base, a model in memory or one behind a server.

Degradations compare the two models on the same tokens. Where their tokenizers differ, which of them reads the data is a
choice to be made and recorded, or the comparison shrinks to the one unit that does not count tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from holdfast.auditing.endpoint import Endpoint, GivenModel, endpoint_of
from holdfast.core.errors import CheckpointError, ConfigError, UnsupportedError
from holdfast.core.hashing import sha256_json
from holdfast.core.library_types import LanguageModel, Tokenizer
from holdfast.core.registry import nearest
from holdfast.data.encode import template_sha256, tokenizer_sha256
from holdfast.models.adapter import adapter_folder, base_of, leaves_base_alone, require_scorable
from holdfast.models.content import ModelContent, content_of
from holdfast.models.fingerprint import adapter_fingerprint, model_fingerprint
from holdfast.models.handle import load_tokenizer
from holdfast.models.source import resolve
from holdfast.records.audit_figures import AuditedModel
from holdfast.scoring.head import causal_lm

Mode = Literal["one model", "adapter", "two adapters", "two models"]
Choice = Literal["same", "before", "after", "own"]
CHOICES: tuple[Choice, ...] = get_args(Choice)


@dataclass(frozen=True)
class ModelRef:
    """One of the two models, as the user named it (`ref`), with the sha256 of its files or, in memory, its tensors.

    `base` is the full model to load; of an adapter, whose folder is `adapter`, the model it names. A model that came in
    memory is `loaded` and has no `content` of files. Of an `endpoint` the sha256 is that of its address and name alone.
    """

    ref: str
    sha256: str
    revision: str | None = None
    base: str | Path = ""
    base_revision: str | None = None
    adapter: Path | None = None
    loaded: Any = None
    content: ModelContent | None = None
    endpoint: Endpoint | None = None

    @property
    def record(self) -> AuditedModel:
        """What an audit says of it; of an endpoint no sha256, since nobody saw its weights."""
        if self.endpoint is None:
            return {"ref": self.ref, "sha256": self.sha256}
        return {"ref": self.ref, "sha256": None, "endpoint": self.endpoint.identity}


def model_ref(model: GivenModel, revision: str | None, *, trust_remote_code: bool) -> ModelRef:
    """Find out what a reference or a model in memory is; no weights are loaded."""
    if (endpoint := endpoint_of(model)) is not None:
        if revision is not None:
            what = f"{endpoint.ref} with revision {revision!r}: a server is asked by name alone"
            raise ConfigError(what, remedy="leave the revision out")
        return ModelRef(endpoint.ref, sha256_json(endpoint.identity), endpoint=endpoint)
    if not isinstance(model, (str, Path)):
        return _in_memory(model)
    content = content_of(model, revision=revision, trust_remote_code=trust_remote_code)
    adapter = adapter_folder(resolve(model, revision, trust_remote_code))
    if adapter is None:
        return ModelRef(str(model), content.sha256, revision, model, revision, content=content)
    require_scorable(adapter)
    return ModelRef(str(model), content.sha256, revision, *base_of(adapter), adapter, content=content)


def _in_memory(model: LanguageModel) -> ModelRef:
    if not hasattr(model, "state_dict") or not hasattr(model, "get_output_embeddings"):
        what = f"a model of type {type(model).__name__}, expected a reference or a causal language model"
        raise ConfigError(what, remedy="give a hub id, a folder, an adapter, or a loaded transformers or PEFT model")
    if any(getattr(config, "is_prompt_learning", False) for config in getattr(model, "peft_config", {}).values()):
        what = "a prompt-learning adapter: its virtual tokens shift the positions that losses are read from"
        raise UnsupportedError(what, remedy="use an adapter on the weights, such as LoRA, or a full model")
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
    if any(side.loaded is not None or side.endpoint is not None for side in (before, after)):
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
    if _place(before, trust_remote_code) == _place(after, trust_remote_code):
        return True
    trust: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    contents = {content_of(side.base, revision=side.base_revision, **trust).sha256 for side in (before, after)}
    return len(contents) == 1


def _place(side: ModelRef, trust_remote_code: bool) -> tuple[str, str | None]:
    source = resolve(side.base, side.base_revision, trust_remote_code)
    folder = Path(source.place)
    return (str(folder.resolve()) if folder.is_dir() else source.place), source.revision


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizer of each side, one object for both unless each has its own; and how they were chosen."""

    before: Any
    after: Any
    choice: Choice

    @property
    def own(self) -> bool:
        return self.before is not self.after

    def of(self, name: str) -> Tokenizer:
        return self.before if name == "before" else self.after

    def require_unit(self, unit: str) -> None:
        if self.own and unit != "nll_sum":
            raise UnsupportedError(
                f"unit {unit!r} is not defined across tokenizers: it is counted in tokens",
                remedy="use unit nll_sum, or read both models with one tokenizer (tokenizer: before or after)",
            )

    @cached_property
    def tokenizer_sha256(self) -> str:
        """Hash of what turns text into ids; with two tokenizers, both hashes joined by `+`."""
        return self._joined(tokenizer_sha256)

    @cached_property
    def template_sha256(self) -> str:
        """Hash of the chat template; with two tokenizers, both hashes joined by `+`."""
        return self._joined(template_sha256)

    def _joined(self, digest: Callable[[Tokenizer], str]) -> str:
        return "+".join(digest(tokenizer) for tokenizer in ((self.before, self.after) if self.own else (self.before,)))


def tokenizers_for(
    before: ModelRef,
    after: ModelRef,
    choice: Choice,
    *,
    processing_class: Tokenizer | None = None,
    trust_remote_code: bool = False,
) -> Tokenizers:
    """Load the tokenizers that the choice needs.

    `same` demands equal tokenizers and templates; `before` and `after` use that side's for both; `own` gives each model
    its own. `processing_class` is the tokenizer of models in memory, for both sides where both are. An endpoint that
    names no tokenizer is read with the other side's.
    """
    if not isinstance(choice, str):
        raise ConfigError(
            f"tokenizer is a {type(choice).__name__}, expected one of {', '.join(CHOICES)}",
            remedy="pass a tokenizer as processing_class=; tokenizer= says whose is used",
        )
    if choice not in CHOICES:
        raise ConfigError(f"tokenizer {choice!r} is not a choice", remedy=nearest(str(choice), list(CHOICES)))

    def load(side: ModelRef) -> Tokenizer | None:
        if side.endpoint is not None:
            named = side.endpoint.tokenizer
            return processing_class if named is None else load_tokenizer(named, trust_remote_code=trust_remote_code)
        if side.loaded is None:
            return load_tokenizer(side.ref, revision=side.revision, trust_remote_code=trust_remote_code)
        if processing_class is None:
            what = f"{side.ref}: a model in memory comes without a tokenizer"
            raise ConfigError(what, remedy="pass it as processing_class=")
        return processing_class

    first = None if choice == "after" else load(before)
    second = None if choice == "before" else load(after)
    if first is None or second is None:
        if (chosen := second if first is None else first) is None:
            raise ConfigError(
                "an endpoint comes without a tokenizer, and no other is named to apply the chat template with",
                remedy="add tokenizer=FOLDER (or a hub id) to the endpoint: that of the model that is served",
            )
        return Tokenizers(chosen, chosen, choice)
    digests = {"tokenizers": tokenizer_sha256, "chat templates": template_sha256}
    differing = [name for name, digest in digests.items() if digest(first) != digest(second)]
    if differing and choice == "same":
        raise CheckpointError(
            f"before and after have different {' and '.join(differing)}: degradations would compare other tokens",
            remedy="choose the one to read the data with: `--tokenizer before` or `after` (`holdfast certify`: `--set "
            "tokenizer=before`); for a comparison of likelihoods also `own`, with unit nll_sum",
        )
    return Tokenizers(first, second if differing else first, choice)
