"""What a run will need: estimated from the model's configuration alone, and once more before the first step."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from holdfast.core.library_types import LoraConfig, ModelConfig, Tokenizer
from holdfast.data.encode import encode
from holdfast.data.examples import Example, to_rows
from holdfast.models.adapter import base_of
from holdfast.models.embedded import embedded_model_dir
from holdfast.models.library_errors import one_line_errors
from holdfast.models.lora_layers import named_targets
from holdfast.models.model_files import ADAPTER_CONFIG
from holdfast.models.source import EMBEDDED

if TYPE_CHECKING:
    from holdfast.training.config import SafetyArguments
    from holdfast.training.trainer import SafeTrainer

RATE = 1e14  # floating-point operations a second that a large GPU sustains in bf16 on such steps
SAMPLE = 1000  # rows whose tokens are counted before the first step
# TRL maps the rows three times (tokens, labels, truncation); each time writes text, int32 ids and int64 labels anew.
MAPPED, TOKEN_BYTES = 3, 4 + 8
BYTES = {"float32": 4, "bfloat16": 2, "4bit": 0.5, "8bit": 1}


class Size(NamedTuple):
    """Parameters of a model: all of them, and those that are trained."""

    parameters: int
    trainable: int


class Memory(NamedTuple):
    """Device memory in bytes, by what it holds; kernels, fragmentation and the CUDA context come on top."""

    weights: int
    training_state: int
    activations: int

    @property
    def total(self) -> int:
        return sum(self)


class Steps(NamedTuple):
    steps: int
    task_batch: int
    safety_batch: int
    safety_epochs: float


class SidePasses(NamedTuple):
    """What a defense passes over in each step beside the task's own forward and backward: `batch` rows in each pass."""

    trained: int  # passes with a backward
    looked: int  # passes without
    batch: int
    tokens: float  # of one row


def architecture(model: str, *, revision: str | None, trust_remote_code: bool) -> ModelConfig:
    """The transformers configuration of a model; of an adapter in a folder, its base's."""
    from transformers import AutoConfig

    place = Path(embedded_model_dir() if model == EMBEDDED else model)
    if (place / ADAPTER_CONFIG).is_file():
        base, revision = base_of(place)
        return architecture(base, revision=revision, trust_remote_code=trust_remote_code)
    source = str(place) if place.is_dir() else model
    with one_line_errors(model, "configuration of model"):
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)


def model_size(config: ModelConfig, peft_config: LoraConfig | None) -> Size:
    """Count parameters on the meta device, where tensors have no storage; without an adapter all are trained."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        total = sum(parameter.numel() for parameter in model.parameters())
        if peft_config is None:
            return Size(total, total)
        with named_targets(model):
            model = get_peft_model(model, peft_config)
    return Size(total, sum(p.numel() for p in model.parameters() if p.requires_grad))


def memory(
    size: Size, config: ModelConfig, *, dtype: str, full: bool, rows: int, length: int, checkpointing: bool
) -> Memory:
    """Estimate device memory for `rows` examples of `length` tokens a pass.

    weights = parameters * bytes; training state = trainable * 4 bytes * (gradient, Adam's two moments, snapshot,
    constraint gradient and its average, and for an adapter its own weights); activations = tokens * (what the backward
    pass keeps per layer, and the logits in fp32 with their gradient).
    """
    text = config.get_text_config()
    width = 2 if dtype != "float32" else 4
    # Kept per token: of each layer its input when recomputing, about 17 hidden-sized tensors otherwise.
    layers = text.num_hidden_layers + 17 if checkpointing else text.num_hidden_layers * 17
    return Memory(
        weights=math.ceil(size.parameters * BYTES[dtype]),
        training_state=size.trainable * (24 + (0 if full else 4)),
        activations=rows * length * (layers * text.hidden_size * width + text.vocab_size * 4 * 2),
    )


def passes_beside(passes: str, stage: str) -> tuple[int, int]:
    """Passes with and without a backward beside the task's own, from the words that a defense describes them with.

    Such as `3 forward + backward, 1 forward`; by stage as in `align: 4 forward + backward; finetune: ...`.
    """
    own = re.search(rf"\b{stage}: ([^;]*)", passes)
    found = re.findall(r"(\d+) forward( \+)?", own[1] if own else passes)
    trained = sum(int(n) for n, backward in found if backward)
    return max(trained - 1, 0), sum(int(n) for n, backward in found if not backward)


def work(size: Size, count: Steps, *, task_tokens: float, checkpointing: bool, side: SidePasses) -> float:
    """Estimate the arithmetic: per token 2 operations a parameter forward, 2 for the activations' gradient, 2 a trained
    parameter for its own, and another 2 forward when activations are recomputed. Padding is not counted.
    """
    per_token = (4 + 2 * checkpointing) * size.parameters + 2 * size.trainable
    trained = count.task_batch * task_tokens + side.trained * side.batch * side.tokens
    looked = side.looked * side.batch * side.tokens
    return count.steps * (trained * per_token + looked * 2 * size.parameters)


def steps(arguments: SafetyArguments, *, task_rows: int, constraint_rows: int, world: int = 1) -> Steps:
    """Count optimizer steps as transformers does, and how often the constraint set is passed through."""
    batch = arguments.per_device_train_batch_size * world
    updates = max(1, math.ceil(math.ceil(task_rows / batch) / arguments.gradient_accumulation_steps))
    total = arguments.max_steps if arguments.max_steps > 0 else math.ceil(arguments.num_train_epochs * updates)
    task_batch = batch * arguments.gradient_accumulation_steps
    safety_batch = (arguments.safety_batch_size or task_batch) if constraint_rows else 0
    return Steps(total, task_batch, safety_batch, total * safety_batch / max(constraint_rows, 1))


def disk_of_rows(rows: Sequence[Example], tokenizer: Tokenizer) -> int:
    """Estimate the bytes on disk that a process's task rows take while it trains.

    rows * (bytes of text + 3 * (bytes of text + 12 * tokens)), of `SAMPLE` rows taken evenly.
    """
    sample = rows[:: math.ceil(len(rows) / SAMPLE)] if rows else rows
    text = sum(len(json.dumps(row, ensure_ascii=False).encode()) for row in to_rows(sample))
    tokens = sum(len(encode(row, tokenizer, max_length=None).input_ids) for row in sample)
    return round((text + MAPPED * (text + TOKEN_BYTES * tokens)) * len(rows) / max(1, len(sample)))


def forecast(trainer: SafeTrainer) -> str:
    """What training will need, before its first step: of the model as it is loaded and the first rows as tokens."""
    args, model, data = trainer.args, trainer.model, trainer.run.data
    size = Size(model.num_parameters(), model.num_parameters(only_trainable=True))
    lengths = [len(ids) for ids in trainer.train_dataset[:SAMPLE]["input_ids"]]
    middle = statistics.median(lengths)
    held = [one.steering_rows for one in trainer.safety.values()]
    constraint_rows = min(map(len, held), default=0)
    count = steps(args, task_rows=len(trainer.train_dataset), constraint_rows=constraint_rows, world=args.world_size)
    # Passes beside the task's own are over harmful pairs, over the constraint sets, or over the task once more.
    beside = [data.harmful] if data.harmful else held
    tokens = sum(statistics.median(len(item.input_ids) for item in rows) for rows in beside)
    batch = (args.safety_batch_size or count.task_batch) if beside else count.task_batch
    side = SidePasses(*passes_beside(trainer.defense.passes, args.stage), batch, tokens or middle)
    need = memory(
        size, model.config, dtype="float32" if model.dtype == torch.float32 else "bfloat16",
        full=size.parameters == size.trainable, rows=args.per_device_train_batch_size, length=max(lengths),
        checkpointing=args.gradient_checkpointing,
    )  # fmt: skip
    effort = work(size, count, task_tokens=middle, checkpointing=args.gradient_checkpointing, side=side)
    time = f"{timedelta(seconds=round(effort / RATE))} at 100 TFLOP/s" if torch.cuda.is_available() else "on a CPU"
    return f"estimated: {need.total / 2**30:.2g} GiB of memory per device, {effort / 1e15:.3g} PFLOP, {time}"
