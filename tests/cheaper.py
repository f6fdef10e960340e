"""What hundreds of tests and their processes would do again and again, done once per process."""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib.metadata
import os
from dataclasses import fields
from typing import Any

import jinja2
import typer.main

SMALL = 1000  # tokens: the vocabulary is part of the key
_known: dict[tuple[Any, ...], Any] = {}
same_rows = False  # set in processes of a group that all prepare the same rows in the same order


def calls() -> None:
    """Flushing to disk takes 40 % of a checkpoint's time, and only a power cut would show whether it happened.

    Every checkpoint has PEFT's model card, from a template that is compiled anew; every trainer asks for the version of
    PEFT, every command in this process for all commands. A chat template is tried in a process of its own. Tiny models
    give a handful of replies to thousands of prompts, each of which is sorted: this is called before anybody imports
    the function that does it.
    """
    from holdfast.judging import reply_classes
    from holdfast.models import chat_template

    os.fsync = os.fstat  # type: ignore[assignment]
    jinja2.Environment.compile = functools.lru_cache(jinja2.Environment.compile)  # type: ignore[assignment]
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    typer.main.get_command = functools.cache(typer.main.get_command)
    chat_template._tried = functools.cache(chat_template._tried)
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
    _probe_once()
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
        plain &= same_rows or os.environ.get("WORLD_SIZE", "1") == "1"  # ranks wait for each other there
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


def _plain_forward(module: Any) -> bool:
    """Whether a module's forward is its class's, or TRL's or accelerate's around that one."""
    own = vars(module).get("forward")
    if own is None:
        return True
    function = getattr(own, "__func__", None)
    if function is None:
        return False
    held = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if "/trl/trainer/" in function.__code__.co_filename:
        inner = held["original_forward"].cell_contents
    elif "/accelerate/utils/" in function.__code__.co_filename:
        inner = vars(module).get("_original_forward")
    else:
        return False
    return getattr(inner, "__func__", None) is type(module).forward


def _probe_once() -> None:
    """Every fused run tries packed rows first: once for the same layers, weights, settings and rows is enough.

    Tests of the trial call it by another name. A model with hooks or a forward that no library gave it is always tried,
    and what a test replaces in the code of the trial or in a class of layers is part of the key.
    """
    import torch

    from holdfast.fused import body, delta_rule, grouped_lora, packed_rows, probe
    from holdfast.training import fused_setup

    classes = (body.Body, body.EagerPasses, grouped_lora.GroupedAdapter, probe._Probe)
    code = [vars(one) for one in (body, delta_rule, grouped_lora, packed_rows, probe, *classes)]
    places = [name for name in vars(torch.nn.Module()) if name.endswith("_hooks")]
    known: dict[tuple[Any, ...], str | None] = {}

    def tried(passes: Any, rows: Any, pad_token_id: int) -> str | None:
        one = passes.body
        hooks = [hook for m in one.modules for name in places for hook in vars(m)[name].values()]
        foreign = not all(str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks)
        if foreign or not all(_plain_forward(m) for m in one.modules):
            return probe.packing_problem(passes, rows, pad_token_id)
        simple = (bool, int, float, str)
        layers = [
            (type(m), type(m).forward, *((k, v) for k, v in vars(m).items() if isinstance(v, simple)))
            for m in one.modules
        ]
        state = hashlib.sha256()
        for name, tensor in [*one.model.named_parameters(), *one.model.named_buffers()]:
            state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode())
            state.update(tensor.detach().contiguous().flatten().cpu().view(torch.uint8).numpy())
        key = (
            tuple(layers), tuple(hook.__code__ for hook in hooks), state.digest(), repr(one._config),
            one._config._attn_implementation, one.dtype,
            tuple(str(layer.module.scaling) for layer in one.adapter.layers), one.adapter.count, one.adapter.dropout,
            tuple(rows), pad_token_id, tuple(f for space in code for f in space.values() if callable(f)),
        )  # fmt: skip
        if key not in known:
            known[key] = probe.packing_problem(passes, rows, pad_token_id)
        return known[key]

    fused_setup.packing_problem = tried  # type: ignore[attr-defined]
