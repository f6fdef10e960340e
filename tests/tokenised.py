"""TRL tokenises a data set once per session: the same rows come up in hundreds of runs of the tiny model."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

from datasets import Dataset
from transformers import TrainingArguments
from trl import SFTConfig, SFTTrainer

SMALL = 1000  # tokens: the vocabulary is part of the key
OWN = sorted({field.name for field in fields(SFTConfig)} - {field.name for field in fields(TrainingArguments)})
_prepare = SFTTrainer._prepare_dataset
_known: dict[tuple[Any, ...], Dataset] = {}


def _prepared(
    self: Any, dataset: Any, processing_class: Any, args: Any, packing: bool, formatting_func: Any, dataset_name: str
) -> Any:
    """What `SFTTrainer._prepare_dataset` made of the same rows with the same tokenizer and the same settings."""
    arguments = (dataset, processing_class, args, packing, formatting_func, dataset_name)
    plain = type(dataset) is Dataset and dataset.format["type"] is None and formatting_func is None
    if not plain or not hasattr(processing_class, "backend_tokenizer") or len(processing_class) > SMALL:
        return _prepare(self, *arguments)
    settings = [getattr(args, name) for name in OWN]
    key = (
        dataset._fingerprint, processing_class.backend_tokenizer.to_str(), repr(processing_class.special_tokens_map),
        processing_class.chat_template, self.chat_template, self.completion_only_loss, packing, repr(settings),
    )  # fmt: skip
    if key not in _known:
        _known[key] = _prepare(self, *arguments)
    return copy.copy(_known[key])


def once() -> None:
    """From now on."""
    SFTTrainer._prepare_dataset = _prepared
