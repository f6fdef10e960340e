"""The model that is asked: theta_0 in memory, or behind vLLM or a named endpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from holdfast.data.encode import template_sha256, tokenizer_sha256
from holdfast.data.examples import Example
from holdfast.data.templates import Template
from holdfast.evaluation.engines import open_engine
from holdfast.evaluation.prompts import prompt_ids
from holdfast.screening.asking import HELD, Asker, Told

BATCH_CPU, BATCH_CUDA = 32, 256
REMOTE = ("endpoint",)


def asker_of(
    model: Any,
    tokenizer: Any,
    *,
    model_sha256: str,
    template: Template = "chat",
    engine: str = "auto",
    options: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    told: Told | None = None,
) -> Asker:
    """Ready to ask.

    Args:
        model: loaded, on its device; None where the engine reaches a model by other means.
        tokenizer: with the run's template.
        model_sha256: the model's content; replies are stored by it.
        engine, options: see `holdfast.evaluation.engines`. Prompts leave the machine for an `endpoint` alone.
        folder: of the stored replies; the user's cache unless given.
        told: receives what is asked and how far it is.
    """
    device = getattr(getattr(model, "device", None), "type", None)
    batch = BATCH_CUDA if device == "cuda" else BATCH_CPU
    made = open_engine(
        engine, model=None if engine in REMOTE else model, tokenizer=tokenizer, batch_size=batch, template=template,
        **(options or {}),
    )  # fmt: skip
    identity = {
        "model_sha256": model_sha256, "template": template, "batch_size": batch,
        "tokenizer_sha256": None if tokenizer is None else tokenizer_sha256(tokenizer),
        "template_sha256": None if tokenizer is None else template_sha256(tokenizer),
        "dtype": str(getattr(model, "dtype", None)).removeprefix("torch."), "device": device,
    }  # fmt: skip
    return Asker(made, identity, folder, told, fits=None if engine in REMOTE else _fits(model, tokenizer, template))


def _fits(model: Any, tokenizer: Any, template: Template) -> Any:
    """A test of prompts: whether the model's positions leave room for a whole reply."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)

    def fitting(examples: Sequence[Example]) -> list[bool]:
        if positions is None:
            return [True] * len(examples)
        return [len(ids) + HELD <= positions for ids in prompt_ids(tokenizer, examples, template)]

    return fitting


@contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Asking leaves no trace in training: random states and module modes are put back."""
    modes = [] if model is None else [(module, module.training) for module in model.modules()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
