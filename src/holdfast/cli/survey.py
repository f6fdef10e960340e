"""What can be known about a run before its weights are loaded: splits, tokens, masks, feasibility, size."""

import os
import statistics
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch

from holdfast.core.provenance import peak_memory
from holdfast.data.encode import IGNORE, Encoded, encode_each, require_usable_tokenizer
from holdfast.data.examples import Example
from holdfast.data.splits import Split
from holdfast.data.templates import use_template
from holdfast.models.handle import fast_dtype, load_tokenizer
from holdfast.models.source import resolve
from holdfast.records.stored_evidence import NotAtHandError, content_at_hand
from holdfast.runs.config import describe_preset
from holdfast.runs.config.resolve import ResolvedRun, peft_config
from holdfast.runs.pipeline import read_data
from holdfast.runs.stages import estimate
from holdfast.runs.stages.certifiable import asked_note, bundled_share, openings_note, share_notes
from holdfast.runs.stages.finetune import unaligned_of
from holdfast.runs.stages.prepare import Prepared, row_counts, share_scope
from holdfast.screening.asking import plan_asking
from holdfast.training.support import require_supported_arguments

SAMPLES = 3
MASK_WIDTH = 40
HIDDEN, SCORED = ".", "#"


def survey(plan: ResolvedRun, *, reveal: bool = False, trust_remote_code: bool = False) -> dict[str, Any]:
    """Everything about a run as JSON values; `reveal` has tokens of sample examples, which may be harmful to read."""
    config, arguments, method = plan.config, plan.arguments, plan.defense
    require_supported_arguments(arguments)
    unaligned = unaligned_of(plan, trust_remote_code)
    if unaligned is not None:
        resolve(unaligned, None, trust_remote_code=False)  # refuses a folder that is not there
    data = read_data(config)
    tokenizer = load_tokenizer(config.model, revision=config.revision, trust_remote_code=trust_remote_code)
    use_template(tokenizer, config.template)
    require_usable_tokenizer(tokenizer, needs_chat=any(example.kind == "chat" for example in data.task))
    counted = estimate.steps(
        arguments, task_rows=len(data.task), world=int(os.environ.get("WORLD_SIZE", "1")),
        constraint_rows=min((len(split.constraint) for split in data.safety.values()), default=0),
    )  # fmt: skip
    tokens = partial(_tokens, tokenizer, arguments.max_length, reveal)
    task = tokens("task", data.task)
    described = {
        name: _described(plan, name, split, counted.safety_batch)
        | tokens("safety", [*split.constraint, *split.monitor, *split.certify])
        for name, split in data.safety.items()
    }
    harmful = None if data.harmful is None else {"rows": len(data.harmful), **tokens("safety", data.harmful)}
    size, needed = _size(plan, task["tokens_max"], trust_remote_code)
    counts = {"task": [task], "harmful": [harmful or {}], "safety": list(described.values())}
    flop, side_batch = _effort(plan, counted, size, counts)
    return {
        "config_sha256": plan.sha256, "data": row_counts(data),
        "preset": [entry._asdict() for entry in describe_preset(config.preset)] if config.preset else [],
        "task": {"rows": len(data.task), **task}, "safety": described,
        "asked": {name: _asked(plan, name, data, trust_remote_code) for name in config.prompt_sets},
        "harmful": harmful, "unaligned": unaligned,
        "asking": None if plan.screening is None else asdict(plan_asking(data.task, plan.screening)),
        **needed, "host_memory": peak_memory(), "disk": estimate.disk_of_rows(data.task, tokenizer),
        "steps": counted._asdict(), "learning_rate": arguments.learning_rate,
        "work": {"flop": flop, "seconds_at_100_tflops": flop / estimate.RATE, "gpu_here": torch.cuda.is_available()},
        "defense": {
            "name": method.name, "stage": config.stage, "passes": method.passes, "side_batch": side_batch,
            "constrains": method.constrains, "estimator": getattr(method.config, "estimator", None),
        },
    }  # fmt: skip


def _effort(
    plan: ResolvedRun, counted: estimate.Steps, size: estimate.Size, tokens: dict[str, list[dict[str, Any]]]
) -> tuple[float, dict[str, Any] | None]:
    """Operations of the run, and the rows that the passes beside the task's are over (None: its own rows once more)."""
    trained, looked = estimate.passes_beside(plan.defense.passes, plan.config.stage)
    kind = next((kind for kind in ("harmful", "safety") if kind in plan.needs and trained + looked), "task")
    batch = counted.task_batch if kind == "task" else (plan.arguments.safety_batch_size or counted.task_batch)
    side = estimate.SidePasses(trained, looked, batch, sum(entry["tokens_median"] for entry in tokens[kind]))
    checkpointing, median = plan.arguments.gradient_checkpointing, tokens["task"][0]["tokens_median"]
    effort = estimate.work(size, counted, task_tokens=median, checkpointing=checkpointing, side=side)
    return effort, None if kind == "task" else {"kind": kind, "rows": batch}


def _size(plan: ResolvedRun, longest: int, trust_remote_code: bool) -> tuple[estimate.Size, dict[str, Any]]:
    config, arguments = plan.config, plan.arguments
    shape = estimate.architecture(config.model, revision=config.revision, trust_remote_code=trust_remote_code)
    size = estimate.model_size(shape, peft_config(config))
    stored = str(getattr(shape, "dtype", None) or "float32").removeprefix("torch.")
    dtype: str = config.quantization or config.dtype
    if dtype == "auto":
        dtype = "float32" if fast_dtype() == "float32" else stored
    need = estimate.memory(
        size, shape, dtype=dtype, full=config.lora is None, rows=arguments.per_device_train_batch_size,
        length=longest, checkpointing=arguments.gradient_checkpointing,
    )  # fmt: skip
    memory_of = {**need._asdict(), "total": need.total}
    return size, {"model": {**size._asdict(), "dtype": dtype}, "memory": memory_of}


def _described(plan: ResolvedRun, name: str, split: Split, batch: int) -> dict[str, Any]:
    limit = plan.constraints[name]
    return {
        **{role: len(examples) for role, examples in split.roles.items()},
        "duplicates_dropped": split.record.duplicates_dropped, "moved_from_certify": split.record.moved_from_certify,
        "constraint_text": limit.describe(), "feasible_start": limit.feasible_start,
        "start_value": limit.start_value() + limit.buffer, "batch_times_alpha": batch * limit.alpha,
        **share_notes(plan, name, split),
    }  # fmt: skip


def _asked(plan: ResolvedRun, name: str, data: Prepared, trust_remote_code: bool) -> dict[str, Any]:
    config, block, limit = plan.config, plan.config.safety[name], plan.constraints[name]
    prompts, keep, openings = list(block.prompts or ()), block.keep or "refusals", block.openings
    note: str | None = None
    with suppress(NotAtHandError):  # whose openings these are is known once the model is there
        before = content_at_hand(config.model, revision=config.revision, trust_remote_code=trust_remote_code)
        scope, certify = share_scope(before, data.task), bundled_share(prompts, keep, block.limit)
        note = openings_note(None, certify, openings=openings, run=config.output_dir, scope=scope)
    return {
        "prompts": prompts, "keep": keep, "constraint_text": limit.describe(), "openings_note": note,
        "certify_note": asked_note(prompts, keep, alpha=limit.alpha, openings=openings, limit=block.limit),
    }  # fmt: skip


def _tokens(
    tokenizer: Any, max_length: int | None, reveal: bool, role: Literal["task", "safety"], examples: Sequence[Example]
) -> dict[str, Any]:
    lengths, truncated = array("q"), 0
    first: list[Encoded] = []
    for item in encode_each(examples, tokenizer, max_length=max_length, role=role):
        lengths.append(len(item.input_ids))
        truncated += item.truncated
        first += [item] if len(first) < SAMPLES else []
    ids = {item.id for item in first}
    places = {example.id: example.where for example in examples if example.id in ids}
    shown = [
        {"id": item.id, "where": places[item.id], "tokens": len(item.input_ids), "scored": item.n_labels}
        | {"mask": mask_bar(item)}
        | ({"pieces": [tokenizer.decode([token]) for token in item.input_ids]} if reveal else {})
        for item in first
    ]
    counts = {"tokens_median": int(statistics.median(lengths)), "tokens_max": max(lengths), "truncated": truncated}
    return {**counts, "examples": shown}


def mask_bar(item: Encoded) -> str:
    """The label mask as text, at most `MASK_WIDTH` wide; a column is `#` where any of its tokens is scored."""
    flags = [label != IGNORE for label in item.labels]
    width = min(MASK_WIDTH, len(flags))
    edges = [round(column * len(flags) / width) for column in range(width + 1)]
    return "".join(SCORED if any(flags[a:b]) else HIDDEN for a, b in pairwise(edges))
