"""What hundreds of tests and their processes would do again and again, done once per process."""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import os
from dataclasses import fields
from typing import Any

import jinja2
import typer.main

SMALL = 1000  # tokens: the vocabulary is part of the key
_known: dict[tuple[Any, ...], Any] = {}


def calls() -> None:
    """Flushing to disk takes 40 % of a checkpoint's time, and only a power cut would show whether it happened.

    Every checkpoint has PEFT's model card, from a template that is compiled anew; every trainer asks for the version of
    PEFT, every command in this process for all commands. Tiny models give a handful of replies to thousands of prompts,
    each of which is sorted: this is called before anybody imports the function that does it.
    """
    from holdfast.judging import reply_classes

    os.fsync = os.fstat  # type: ignore[assignment]
    jinja2.Environment.compile = functools.lru_cache(jinja2.Environment.compile)  # type: ignore[assignment]
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    typer.main.get_command = functools.cache(typer.main.get_command)
    reply_classes.sort_reply = functools.lru_cache(reply_classes.sort_reply)


def training() -> None:
    """TRL tokenises a data set once: the same rows come up in hundreds of runs of the tiny model.

    Which, besides, takes as long to reply to 32 prompts as to 256. Every run sets seeds: for each kind of device that
    is not there torch would put that off, and note the stack.
    """
    import torch
    from datasets import Dataset
    from transformers import TrainingArguments
    from trl import SFTConfig, SFTTrainer

    from holdfast.screening import asking

    asking.BATCH_CPU = 256
    if not torch.cuda.is_available():
        for absent in (torch.cuda.random, torch.xpu.random, torch.mtia):
            absent._lazy_call = lambda *_, **__: None  # type: ignore[attr-defined]
    prepare = SFTTrainer._prepare_dataset
    own = sorted({field.name for field in fields(SFTConfig)} - {field.name for field in fields(TrainingArguments)})

    def prepared(
        self: Any, dataset: Any, tokenizer: Any, args: Any, packing: bool, formatting_func: Any, dataset_name: str
    ) -> Any:
        """What `SFTTrainer._prepare_dataset` made of the same rows with the same tokenizer and the same settings."""
        arguments = (dataset, tokenizer, args, packing, formatting_func, dataset_name)
        plain = type(dataset) is Dataset and dataset.format["type"] is None and formatting_func is None
        plain &= os.environ.get("WORLD_SIZE", "1") == "1"  # ranks wait for each other there
        if not plain or not hasattr(tokenizer, "backend_tokenizer") or len(tokenizer) > SMALL:
            return prepare(self, *arguments)
        key = (
            dataset._fingerprint, tokenizer.backend_tokenizer.to_str(), repr(tokenizer.special_tokens_map),
            tokenizer.chat_template, self.chat_template, self.completion_only_loss, packing,
            repr([getattr(args, name) for name in own]),
        )  # fmt: skip
        if key not in _known:
            _known[key] = prepare(self, *arguments)
        return copy.copy(_known[key])

    SFTTrainer._prepare_dataset = prepared
