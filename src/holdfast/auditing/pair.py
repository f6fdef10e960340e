"""Two models, held with as few weights in memory as possible.

| mode         | in memory                                        |
|--------------|--------------------------------------------------|
| one model    | one: both references are the same model          |
| adapter      | the base once; one side is the base, adapter off |
| two adapters | the base once, both adapters beside it           |
| two models   | one at a time, unless both are asked for at once |
"""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, Self, get_args

import torch

from holdfast.auditing.endpoint import GivenModel
from holdfast.auditing.model_ref import Choice, Mode, ModelRef, Tokenizers, mode_of, model_ref, stacked, tokenizers_for
from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.core.library_types import LanguageModel, Tokenizer
from holdfast.models.adapter import attach, not_plain_lora
from holdfast.models.content import require_unchanged
from holdfast.models.handle import DType, check_vocabulary, fast_dtype, load_model, require_device
from holdfast.scoring.completion import adapter_layers, adapters_off, deterministic

logger = logging.getLogger(__name__)

Name = Literal["before", "after"]
NAMES: tuple[Name, ...] = get_args(Name)


class Pair:
    """Two models and their tokenizers; a context manager that frees them at its end.

    Attributes:
        before, after: what each side is, with its sha256.
        mode: how they share weights.
        tokenizers: which tokenizer each side reads.
        asked_dtype: as asked for; `dtype` is what was found.
        strength: of the adapter of `after`, once it was set.
    """

    def __init__(
        self, sides: dict[str, ModelRef], mode: Mode, tokenizers: Tokenizers, *, dtype: DType, device: torch.device,
        trust_remote_code: bool,
    ) -> None:  # fmt: skip
        self.before, self.after = sides["before"], sides["after"]
        self.mode, self.tokenizers, self.device, self._trust = mode, tokenizers, device, trust_remote_code
        self.asked_dtype: DType = dtype
        self.strength: float | None = None
        self._models: dict[Name, Any] = {}
        self._dtypes: dict[Name, str] = {}
        self._lora_b: list[tuple[Any, Any]] = []
        self._layers: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def served(self) -> list[Name]:
        """The sides that are behind an endpoint."""
        return [name for name in NAMES if self.ref(name).endpoint is not None]

    def ref(self, name: Name) -> ModelRef:
        return self.before if name == "before" else self.after

    @property
    def switchable(self) -> bool:
        """Whether both sides are at hand with one set of base weights."""
        return self.mode != "two models"

    @property
    def together(self) -> bool:
        """Whether both sides can run on a batch without loading anything between them."""
        given = self.before.loaded is not None and self.after.loaded is not None
        return self.switchable or given or len(self._models) == len(NAMES)

    @property
    def bound_dtype(self) -> DType:
        """What figures are bound to: they are not continued on a machine where `auto` is another precision."""
        slow = self.asked_dtype == "auto" and fast_dtype(self.device) == "float32"
        return "float32" if slow else self.asked_dtype

    @property
    def dtype(self) -> str:
        """The weights' dtype as loaded; both, where they differ. Known once both sides have been used."""
        known = self._dtypes | dict.fromkeys(self.served, "unknown")
        return " and ".join(dict.fromkeys(known[name] for name in NAMES if name in known))

    def release(self, name: Name | None = None) -> None:
        """Free the models that were loaded here, or one of them; a model that came in memory is its owner's."""
        self._lora_b, self._layers = [], []
        for key in NAMES if name is None or self.switchable else (name,):
            model = self._models.pop(key, None)
            if model is not None and not any(model is side.loaded for side in (self.before, self.after)):
                model.to("meta")  # frees the weights even while a caller's loop variable still names the model
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def on(self, name: Name) -> Iterator[LanguageModel]:
        model, side = self.model(name), self.ref(name)
        if self.mode == "two adapters":
            model.set_adapter(name, inference_mode=True)
        plain = self.mode == "adapter" and side.adapter is None and not _peft_in_memory(side)
        with adapters_off(model, self._layers) if plain else nullcontext():
            yield model

    @contextmanager
    def using(self, name: Name) -> Iterator[LanguageModel]:
        """One side in evaluation mode; of two models it is freed at the end, before the other one is loaded."""
        keep = self.together  # of what is in memory now: loading this side may change that
        with self.on(name) as model, deterministic(model):
            yield model
        if not keep:
            self.release(name)

    def leave(self, name: Name) -> None:
        """Free a side before the other one is loaded, unless both are held."""
        if not self.together:
            self.release(name)

    def sides(self) -> Iterator[tuple[Name, LanguageModel]]:
        """Each side in turn."""
        for name in NAMES:
            with self.using(name) as model:
                yield name, model

    def require_unchanged(self) -> None:
        """Hash the files of both models again, after measuring and before anything is written.

        What was measured is then what was hashed before it was loaded. A model in memory has no files.
        """
        require_unchanged(side.content for side in (self.before, self.after) if side.content is not None)

    def set_strength(self, strength: float) -> None:
        """Make `after` W + strength * scaling * B A, by scaling B; refused unless it is a plain LoRA on `before`."""
        adapter = self.after.adapter
        problem = "it is not an adapter on disk" if adapter is None else not_plain_lora(adapter)
        if problem is None and self.mode != "adapter":
            problem = "before is not its base"
        if problem is not None:
            what = f"{self.after.ref} has no strength to scale: {problem}"
            raise UnsupportedError(what, remedy="use a plain LoRA adapter, with its base as before")
        if not self._lora_b:
            named = self.model("after").named_parameters()
            factors = [p for key, p in named if ".lora_B." in key or ".lora_embedding_B." in key]
            self._lora_b = [(p, p.detach().clone()) for p in factors]
        with torch.no_grad():
            for parameter, original in self._lora_b:
                parameter.copy_(original * strength)
        self.strength = strength

    def model(self, name: Name) -> LanguageModel:
        """The model that carries a side, loaded if need be; one object for both sides unless there are two models."""
        if name not in self._models:
            model = self._load(name)
            self._layers = adapter_layers(model)
            for key in NAMES if self.switchable else (name,):
                self._models[key] = model
                check_vocabulary(model, self.tokenizers.of(key))
                self._dtypes[key] = _weights_dtype(model)
            if len(dict.fromkeys(self._dtypes.values())) > 1:
                logger.warning("the models' weights differ in dtype (%s): rounding is part of D", self.dtype)
        return self._models[name]

    def _load(self, name: Name) -> LanguageModel:
        given = [side for side in (self.before, self.after) if side.loaded is not None]
        if self.mode == "adapter" and given:
            return next(side.loaded for side in given if _peft_in_memory(side))
        side = self.ref(name)
        if side.loaded is not None:
            return side.loaded
        base = load_model(
            side.base, dtype=self.asked_dtype, revision=side.base_revision, device=self.device,
            trust_remote_code=self._trust,
        )  # fmt: skip
        if self.mode in ("adapter", "two adapters"):
            pairs = {"before": self.before.adapter, "after": self.after.adapter}
            return attach(base, {key: folder for key, folder in pairs.items() if folder is not None})
        return base if side.adapter is None else attach(base, {"default": side.adapter})


def open_pair(
    before: GivenModel, after: GivenModel, *, dtype: DType = "auto", device: str | torch.device | None = None,
    tokenizer: Choice = "same", trust_remote_code: bool = False, before_revision: str | None = None,
    after_revision: str | None = None, processing_class: Tokenizer | None = None,
) -> Pair:  # fmt: skip
    """Resolve, hash and compare two models; weights are loaded when they are first used.

    Args: as of `holdfast.audit`; `tokenizer`: see `tokenizers_for`. A loaded model stays on its device.
    """
    if dtype not in get_args(DType):
        what = f"dtype {dtype!r} is not supported, expected one of {', '.join(get_args(DType))}"
        raise UnsupportedError(what, remedy="use bfloat16 or float32: fp16 overflows where losses are compared")
    trust: dict[str, bool] = {"trust_remote_code": trust_remote_code}
    first, second = model_ref(before, before_revision, **trust), model_ref(after, after_revision, **trust)
    sides = {"before": stacked(first, second, **trust), "after": stacked(second, first, **trust)}
    places = {str(side.loaded.device) for side in sides.values() if side.loaded is not None}
    if len(places) > 1:
        what = f"the two models are on different devices ({', '.join(sorted(places))})"
        raise ConfigError(what, remedy="move them to one device")
    place = device or (places.pop() if places else "cuda" if torch.cuda.is_available() else "cpu")
    checked, lower, upper = require_device(place), sides["before"], sides["after"]
    tokenizers = tokenizers_for(lower, upper, tokenizer, processing_class=processing_class, **trust)
    return Pair(sides, mode_of(lower, upper, **trust), tokenizers, dtype=dtype, device=checked, **trust)


def _peft_in_memory(side: ModelRef) -> bool:
    return side.loaded is not None and hasattr(side.loaded, "get_base_model")


def _weights_dtype(model: LanguageModel) -> str:
    """The dtype of the embeddings, which no adapter changes; fp16 is refused."""
    if any(p.dtype == torch.float16 for p in model.parameters()):
        raise UnsupportedError("a model in fp16 is not supported", remedy="load it in bfloat16 or float32")
    return str(model.get_input_embeddings().weight.dtype).removeprefix("torch.")
