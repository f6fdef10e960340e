"""What can be known about a run before its weights are loaded: splits, tokens, masks, feasibility, size."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

from holdfast.config import RunConfig, config_sha256, describe_preset
from holdfast.config.build import constraints, defense, peft_config, screening_settings, training_arguments, watches
from holdfast.constraint.chance import ChanceConstraint
from holdfast.data.encode import IGNORE, Encoded, encode_all, require_usable_tokenizer
from holdfast.data.examples import Example
from holdfast.data.splits import Split
from holdfast.data.templates import use_template
from holdfast.models.handle import load_tokenizer, resolve
from holdfast.pipeline import read_data, unaligned_of
from holdfast.records.weights_at_hand import NotAtHandError, content_at_hand
from holdfast.screening.plan import plan_asking
from holdfast.stages.certifiable import asked_note, bundled_share, certify_note, openings_note
from holdfast.stages.estimate import Side, Size, Steps, architecture, memory, model_size, passes_beside, steps, work
from holdfast.stages.hold import share_scope
from holdfast.stages.prepare import Prepared, row_counts
from holdfast.trainers.support import require_supported_arguments

SAMPLES = 3
MASK_WIDTH = 40
HIDDEN, SCORED = ".", "#"


def survey(config: RunConfig, *, reveal: bool = False, trust_remote_code: bool = False) -> dict[str, Any]:
    """Validate everything about a run and describe it, as JSON values.

    Args:
        config: the run.
        reveal: include the token texts of the sample examples, which may be harmful to read.
        trust_remote_code: let the model repository run its own code.
    """
    arguments = training_arguments(config, elsewhere=True)
    require_supported_arguments(arguments)
    method = defense(config)
    unaligned = unaligned_of(config, trust_remote_code)
    if unaligned is not None:
        resolve(unaligned, None, trust_remote_code=False)  # refuses a folder that is not there
    data = read_data(config)
    tokenizer = load_tokenizer(config.model, revision=config.revision, trust_remote_code=trust_remote_code)
    use_template(tokenizer, config.template)
    require_usable_tokenizer(tokenizer, needs_chat=any(example.kind == "chat" for example in data.task))
    counted = _steps(arguments, data)
    limits = constraints(config)
    task = _Tokens(tokenizer, arguments.max_length, "task", reveal).describe(data.task)
    safety = _Tokens(tokenizer, arguments.max_length, "safety", reveal)
    described = {
        name: _roles(split)
        | _limit(limits[name], counted.safety_batch)
        | _notes(config, name, split, limits[name].alpha)
        | safety.describe([*split.constraint, *split.monitor, *split.certify])
        for name, split in data.safety.items()
    }
    harmful = None if data.harmful is None else {"rows": len(data.harmful), **safety.describe(data.harmful)}
    size = _size(config, arguments, task["tokens_max"], trust_remote_code)
    trained, looked = passes_beside(method.passes, config.stage)
    kind = _side_kind(method.needed(config.stage), trained + looked)
    batch = counted.task_batch if kind == "task" else (arguments.safety_batch_size or counted.task_batch)
    rows = {"task": [task], "harmful": [harmful or {}], "safety": list(described.values())}[kind]
    effort = work(
        Size(size["model"]["parameters"], size["model"]["trainable"]),
        counted,
        task_tokens=task["tokens_median"],
        checkpointing=arguments.gradient_checkpointing,
        side=Side(trained, looked, batch, sum(entry["tokens_median"] for entry in rows)),
    )
    return {
        "config_sha256": config_sha256(config),
        "data": row_counts(data),
        "preset": [dataclasses.asdict(entry) for entry in describe_preset(config.preset)] if config.preset else [],
        "task": {"rows": len(data.task), **task},
        "safety": described,
        "asked": {name: _asked(config, name, data, limits[name], trust_remote_code) for name in config.prompt_sets},
        "harmful": harmful,
        "unaligned": unaligned,
        "asking": plan_asking(data.task, screening_settings(config)).to_json() if watches(config) else None,
        **size,
        "steps": dataclasses.asdict(counted),
        "learning_rate": arguments.learning_rate,
        "work": {"flop": effort.flop, "seconds_at_100_tflops": effort.seconds},
        "defense": {
            "name": method.name,
            "stage": config.stage,
            "passes": method.passes,
            "side_batch": {"kind": kind, "rows": batch} if kind != "task" else None,
            "constrains": method.constrains,
            "estimator": getattr(method.config, "estimator", None),
        },
    }


def _steps(arguments: Any, data: Prepared) -> Steps:
    """How long the run is, on as many processes as this one is started with."""
    return steps(
        arguments,
        task_rows=len(data.task),
        constraint_rows=min((len(split.constraint) for split in data.safety.values()), default=0),
        world=int(os.environ.get("WORLD_SIZE", "1")),
    )


def _notes(config: RunConfig, name: str, split: Split, alpha: float) -> dict[str, Any]:
    """What to know about the certify share: its size, and the openings that were used."""
    block = config.safety[name]
    openings, run = block.openings, config.output_dir
    return {
        "certify_note": certify_note(split.record, alpha=alpha, openings=openings),
        "openings_note": openings_note(block.data, split.certify, openings=openings, run=run),
    }


def _asked(
    config: RunConfig, name: str, data: Prepared, limit: ChanceConstraint, trust_remote_code: bool
) -> dict[str, Any]:
    """What is known of a set before its model is asked: what it will be asked, its limit, and who opened its prompts.

    Openings are known where the model's weights are on this machine.
    """
    block = config.safety[name]
    prompts, openings = list(block.prompts or ()), block.openings
    found = {
        "prompts": prompts, "keep": block.keep, "constraint_text": limit.describe(),
        "certify_note": asked_note(prompts, alpha=limit.alpha, openings=openings), "openings_note": None,
    }  # fmt: skip
    try:
        before = content_at_hand(config.model, revision=config.revision, trust_remote_code=trust_remote_code)
    except NotAtHandError:
        return found
    scope, certify = share_scope(before, data.task), bundled_share(prompts)
    note = openings_note(None, certify, openings=openings, run=config.output_dir, scope=scope)
    return found | {"openings_note": note}


def _side_kind(needs: frozenset[str], beside: int) -> str:
    """What the passes beside the task's are over: without side data, the task's own rows once more."""
    return next((kind for kind in ("harmful", "safety") if kind in needs and beside), "task")


def _roles(split: Split) -> dict[str, Any]:
    return {
        "constraint": len(split.constraint),
        "monitor": len(split.monitor),
        "certify": len(split.certify),
        "duplicates_dropped": split.record.duplicates_dropped,
        "moved_from_certify": split.record.moved_from_certify,
    }


def _limit(limit: ChanceConstraint, batch: int) -> dict[str, Any]:
    return {
        "constraint_text": limit.describe(),
        "feasible_start": limit.feasible_start,
        "start_value": limit.start_value() + limit.buffer,
        "batch_times_alpha": batch * limit.alpha,
    }


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """Describes the tokens of examples: how many, how many are cut, and a few with their masks."""

    tokenizer: Any
    max_length: int | None
    role: Literal["task", "safety"]
    reveal: bool

    def describe(self, examples: Sequence[Example]) -> dict[str, Any]:
        encoded = encode_all(examples, self.tokenizer, max_length=self.max_length, role=self.role)
        lengths = [len(item.input_ids) for item in encoded.examples]
        places = {example.id: example.where for example in examples}
        return {
            "tokens_median": int(statistics.median(lengths)),
            "tokens_max": max(lengths),
            "truncated": encoded.n_truncated,
            "examples": [self._example(item, places[item.id]) for item in encoded.examples[:SAMPLES]],
        }

    def _example(self, item: Encoded, where: str) -> dict[str, Any]:
        shown = {
            "id": item.id,
            "where": where,
            "tokens": len(item.input_ids),
            "scored": item.n_labels,
            "mask": mask_bar(item),
        }
        if self.reveal:
            shown["pieces"] = [self.tokenizer.decode([token]) for token in item.input_ids]
        return shown


def mask_bar(item: Encoded) -> str:
    """The label mask as text, `.` for prompt and `#` for scored tokens, at most `MASK_WIDTH` wide.

    A longer example is scaled down; a column is `#` when any of its tokens is scored.
    """
    flags = [label != IGNORE for label in item.labels]
    width = min(MASK_WIDTH, len(flags))
    edges = [round(column * len(flags) / width) for column in range(width + 1)]
    return "".join(SCORED if any(flags[a:b]) else HIDDEN for a, b in pairwise(edges))


def _size(config: RunConfig, arguments: Any, longest: int, trust_remote_code: bool) -> dict[str, Any]:
    shape = architecture(config.model, revision=config.revision, trust_remote_code=trust_remote_code)
    count = model_size(shape, peft_config(config))
    stored = str(getattr(shape, "dtype", None) or "float32").removeprefix("torch.")
    dtype = config.quantization or (stored if config.dtype == "auto" else config.dtype)
    need = memory(
        count,
        shape,
        dtype=dtype,
        full=config.lora is None,
        rows=arguments.per_device_train_batch_size,
        length=longest,
        checkpointing=arguments.gradient_checkpointing,
    )
    return {
        "model": {**dataclasses.asdict(count), "dtype": dtype},
        "memory": {**dataclasses.asdict(need), "total": need.total},
    }
