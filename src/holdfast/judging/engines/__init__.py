"""Engines: what runs a model over prompts. One engine is one file; all decode greedily.

| name         | model                                  | how                                                     |
|--------------|----------------------------------------|---------------------------------------------------------|
| transformers | any causal model, adapters included    | `model.generate`, batched by length                     |
| continuous   | full attention, adapters included      | a row that ends makes room for the next; a CUDA graph   |
| vllm         | a folder or hub id, and a LoRA folder  | the optional package vllm                               |
| endpoint     | behind an OpenAI-compatible server     | HTTP                                                    |
| auto         |                                        | continuous on CUDA where it can, otherwise transformers |
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from holdfast.core.library_types import LanguageModel, Tokenizer
from holdfast.core.registry import Registry
from holdfast.data.examples import Example
from holdfast.data.templates import Template
from holdfast.judging.reply import Reply

logger = logging.getLogger(__name__)

AUTO = "auto"
BATCH_SIZE = 32


@runtime_checkable
class Engine(Protocol):
    """Replies to prompts."""

    @property
    def name(self) -> str: ...

    def generate(self, examples: Sequence[Example], *, max_new_tokens: int) -> Iterator[list[Reply]]:
        """Replies as they finish, in any order; the model must be left alone until the last one.

        An engine whose options choose the model has them in `identity`, a JSON object: see `holdfast.judging.store`.
        """
        ...


ENGINES: Registry[Callable[..., Engine]] = Registry("engine", package="holdfast.judging.engines")


def open_engine(
    name: str, *, model: LanguageModel | None = None, tokenizer: Tokenizer | None = None,
    batch_size: int = BATCH_SIZE, template: Template = "chat", **options: Any,
) -> Engine:  # fmt: skip
    """An engine of `ENGINES`, ready to reply; `auto` is continuous where model and device allow it, else transformers.

    Args:
        model: a loaded model; None where the engine reaches one by other means.
        tokenizer: the model's, with the run's template.
        template: what becomes of plain prompts.
        options: of that engine.
    """
    if name == AUTO:
        name = _chosen(model)
    require_options(name, options)
    return ENGINES[name](model=model, tokenizer=tokenizer, batch_size=batch_size, template=template, **options)


def require_options(name: str, options: Mapping[str, object]) -> None:
    """Refuse options that the engine called `name` does not have, and say which it lacks."""
    ENGINES.require_options(name, options, given=("model", "tokenizer", "batch_size", "template"))


def _chosen(model: LanguageModel | None) -> str:
    from holdfast.judging.engines.continuous import obstacle

    if getattr(getattr(model, "device", None), "type", None) != "cuda":
        return "transformers"
    if (reason := obstacle(model)) is None:
        return "continuous"
    logger.info("generation: %s, so plain batches are decoded instead of continuous ones", reason)
    return "transformers"
