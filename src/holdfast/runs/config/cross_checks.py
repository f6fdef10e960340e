"""What can only be told from several blocks of a run file at once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.core.registry import nearest
from holdfast.core.units import KL_UNITS
from holdfast.runs.config.blocks import NAMED_PROMPTS, SafetyBlock, on_protocol_data
from holdfast.runs.config.problems import Problem
from holdfast.runs.config.schema import RunConfig


def check_together(config: RunConfig) -> list[Problem]:
    """Every contradiction between blocks that are each valid."""
    parts = (_names, _adapter, _defense, _asking, _data)
    return [Problem(*entry) for part in parts for entry in part(config)]


Found = Iterator[tuple[str, str, str]]  # key, what is wrong, and the remedy


def _refused(key: str, look_up: Any, *arguments: Any) -> Found:
    try:
        look_up(*arguments)
    except ConfigError as error:
        yield key, error.what, error.remedy


def _names(config: RunConfig) -> Found:
    if set(config.constraint) != set(config.safety):
        expected, found = ", ".join(config.safety), ", ".join(config.constraint)
        yield (
            "constraint", f"expected the names of the safety sets ({expected}), found {found}",
            "name them alike, or write one block for all",
        )  # fmt: skip


def _adapter(config: RunConfig) -> Found:
    continued = "continue goes on training an adapter, "
    if config.adapter_policy == "continue" and (config.lora is None or config.quantization is not None):
        what = "`lora: null`" if config.lora is None else f"quantization {config.quantization}"
        yield "adapter_policy", f"{continued}which {what} rules out", "use merge"
    elif config.adapter_policy == "continue" and _is_full_model(config.model):
        yield "adapter_policy", f"{continued}and {config.model} is none", "use merge"
    for name, block in config.constraint.items() if config.lora is None else ():
        if block.get("unit") in KL_UNITS:
            yield (
                f"constraint.{name}.unit" if len(config.constraint) > 1 else "constraint.unit",
                f"{block['unit']} reads the reference off the model with its adapter switched off, and `lora: null` "
                "has none",
                "give a `lora` block, or use nll_token",
            )
    if config.quantization is not None and config.lora is None:
        yield "lora", "a quantized model cannot be trained in full", "give a `lora` block, or drop quantization"


def _defense(config: RunConfig) -> Found:
    from holdfast.training.hooks import DEFENSES
    from holdfast.training.side_data import require_stage

    name = config.defense.name
    if name not in DEFENSES:
        return  # said where the block is checked by itself
    cls: Any = DEFENSES[name]
    if wrong := list(_refused("defense", require_stage, cls, config.stage)):
        yield from wrong
        return
    if cls.fresh_lora:  # told before a model is loaded (or, in a study, aligned) in vain
        what = f"{name} needs a LoRA adapter that begins with this run"
        if config.lora is None:
            yield "lora", f"{what}, found null", "give a `lora` block, or use another defense"
        elif config.adapter_policy == "continue":
            yield "adapter_policy", f"{what}, found continue", "use merge"
    needs, roles = cls.needed(config.stage), config.roles
    if "safety" in needs and not config.safety:
        yield "defense", f"{name} needs a safety set", "give `safety`, or use sft"
    pairs = config.harmful is not None and config.harmful.role is None
    if "harmful" in needs and not (pairs or (roles is not None and roles.harmful > 0)):
        yield "harmful", f"{name} needs harmful pairs", "give `harmful: {data: pairs.jsonl}`"
    if "unaligned" in needs and config.unaligned is None and _is_full_model(config.model):
        yield (
            "unaligned", f"{name} needs the weights before alignment, and the model is no adapter",
            "name the model it was aligned from: `unaligned: owner/base`",
        )  # fmt: skip


def _is_full_model(model: str) -> bool:
    """Whether it is certain without asking the hub that this is no adapter."""
    folder = Path(model)
    return model == "embedded" or (folder.is_dir() and not (folder / "adapter_config.json").is_file())


def _asking(config: RunConfig) -> Found:
    for name, block in config.prompt_sets.items():
        key = f"safety.{name}.prompts" if config.named else "safety.prompts"
        yield from ((key, *found) for found in _prompts(block))
    if config.asks and config.stage == "align":
        yield "safety", "a model that is being aligned has no replies yet that could be held", "remove `safety`"
    pairs = any(block.data is not None for block in config.safety.values())
    if config.conflicts not in (None, "keep") and not (config.asks or pairs):
        yield (
            "conflicts",
            "conflicts are found by asking the model, and a run on the protocol's pairs or in alignment does not",
            "use `safety: auto`, or remove `conflicts`",
        )
    from holdfast.judging.engines import AUTO, ENGINES, require_options
    from holdfast.judging.judge import open_judge

    engine, options, judge = config.screening.engine, config.screening.engine_options, config.screening.judge
    if engine == AUTO and options:
        yield "screening.engine_options", "the engine auto has none", "name the engine that they belong to"
    elif engine != AUTO and not (unknown := list(_refused("screening.engine", ENGINES.__getitem__, engine))):
        yield from _refused("screening.engine_options", require_options, engine, options)
    elif engine != AUTO:
        yield from unknown
    if judge is not None and not Path(judge).is_absolute():  # a folder is read when it judges, not when read back
        yield from _refused("screening.judge", open_judge, judge)


def _prompts(block: SafetyBlock) -> Iterator[tuple[str, str]]:
    prompts = block.prompts or []
    for name in prompts:
        if name not in NAMED_PROMPTS and "/" not in name:  # files have absolute paths by now
            yield (
                f"{name!r} is none of {', '.join(NAMED_PROMPTS)}, no file and no hub data set (owner/name)",
                nearest(name, list(NAMED_PROMPTS)),
            )
    if twice := sorted({name for name in prompts if prompts.count(name) > 1}):
        yield f"{twice[0]!r} is listed twice", "list it once"
    fine = [name for name in ("everyday", "borderline") if name in prompts]
    if block.keep == "refusals" and fine:
        yield (
            f"refusals of {' and '.join(fine)} prompts are never held: the model should answer them",
            f"remove {', '.join(fine)}, or put it into a set with `keep: answers`",
        )


def _data(config: RunConfig) -> Found:
    from holdfast.data.tasks import TASKS

    if config.roles is not None and not on_protocol_data({"task": config.task.model_dump()}):
        yield "roles", "the task names its own data", "give `task: {name: ...}`, or remove `roles`"
    if config.task.name is not None:
        yield from _refused("task.name", TASKS.__getitem__, config.task.name)
    if config.harmful is not None and config.harmful.role is not None and config.roles is None:
        yield "harmful", "`role: harmful` is the protocol's, the task names its own data", "give `data`"
