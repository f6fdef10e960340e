"""What can only be told from several blocks of a run file at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.config.problems import Problem
from holdfast.config.safety_sets import on_protocol_data
from holdfast.config.schema import RunConfig
from holdfast.config.what_is_asked import check_asking
from holdfast.core.errors import ConfigError


def check_together(config: RunConfig) -> list[Problem]:
    """Every contradiction between blocks that are each valid."""
    problems = [*_check_names(config), *_check_adapter(config), *_check_defense(config), *check_asking(config)]
    if config.roles is not None and not on_protocol_data({"task": config.task.model_dump()}):
        problems.append(Problem("roles", "the task names its own data", "give `task: {name: ...}`, or remove `roles`"))
    if config.task.name is not None:
        problems += _check_task(config.task.name)
    if config.harmful is not None and config.harmful.role is not None and config.roles is None:
        problems.append(
            Problem("harmful", "`role: harmful` is the protocol's, the task names its own data", "give `data`")
        )
    return problems


def _check_names(config: RunConfig) -> list[Problem]:
    if set(config.constraint) == set(config.safety):
        return []
    expected, found = ", ".join(config.safety), ", ".join(config.constraint)
    return [
        Problem(
            "constraint",
            f"expected the names of the safety sets ({expected}), found {found}",
            "name them alike, or write one block for all",
        )
    ]


def _check_adapter(config: RunConfig) -> list[Problem]:
    problems = []
    if config.adapter_policy == "continue" and (config.lora is None or config.quantization is not None):
        what = "`lora: null`" if config.lora is None else f"quantization {config.quantization}"
        problems.append(
            Problem("adapter_policy", f"continue goes on training an adapter, which {what} rules out", "use merge")
        )
    elif config.adapter_policy == "continue" and _is_full_model(config.model):
        problems.append(
            Problem("adapter_policy", f"continue goes on training an adapter, and {config.model} is none", "use merge")
        )
    problems += [
        Problem(
            f"constraint.{name}.unit" if len(config.constraint) > 1 else "constraint.unit",
            "kl_token reads the reference off the model with its adapter switched off, and `lora: null` has none",
            "give a `lora` block, or use nll_token",
        )
        for name, block in config.constraint.items()
        if config.lora is None and block.get("unit") == "kl_token"
    ]
    if config.quantization is not None and config.lora is None:
        problems.append(
            Problem(
                "lora",
                "a quantized model cannot be trained in full",
                "give a `lora` block, or drop quantization",
            )
        )
    return problems


def _check_task(name: str) -> list[Problem]:
    from holdfast.tasks.task import TASKS

    try:
        TASKS[name]
    except ConfigError as error:
        return [Problem("task.name", error.what, error.remedy)]
    return []


def _check_defense(config: RunConfig) -> list[Problem]:
    """Whether the defense acts in this stage, and has the data it needs."""
    from holdfast.trainers.hooks import DEFENSES
    from holdfast.trainers.side_data import require_stage

    if config.defense.name not in DEFENSES:
        return []  # said where the block is checked by itself
    cls: Any = DEFENSES[config.defense.name]
    try:
        require_stage(cls, config.stage)
    except ConfigError as error:
        return [Problem("defense", error.what, error.remedy)]
    needs = cls.needed(config.stage)
    problems = _check_fresh_lora(config) if cls.fresh_lora else []
    if "safety" in needs and not config.safety:
        problems.append(Problem("defense", f"{config.defense.name} needs a safety set", "give `safety`, or use sft"))
    if "harmful" in needs and not _has_harmful(config):
        problems.append(
            Problem("harmful", f"{config.defense.name} needs harmful pairs", "give `harmful: {data: pairs.jsonl}`")
        )
    if "unaligned" in needs and config.unaligned is None and _is_full_model(config.model):
        problems.append(
            Problem(
                "unaligned",
                f"{config.defense.name} needs the weights before alignment, and the model is no adapter",
                "name the model it was aligned from: `unaligned: owner/base`",
            )
        )
    return problems


def _check_fresh_lora(config: RunConfig) -> list[Problem]:
    """A defense of LoRA's own factors, told before a model is loaded (or, in a study, aligned) in vain."""
    what = f"{config.defense.name} needs a LoRA adapter that begins with this run"
    if config.lora is None:
        return [Problem("lora", f"{what}, found null", "give a `lora` block, or use another defense")]
    if config.adapter_policy == "continue":
        return [Problem("adapter_policy", f"{what}, found continue", "use merge")]
    return []


def _has_harmful(config: RunConfig) -> bool:
    if config.harmful is not None:
        return config.harmful.role is None or (config.roles is not None and config.roles.harmful > 0)
    return config.roles is not None and config.roles.harmful > 0


def _is_full_model(model: str) -> bool:
    """Whether it is certain without asking the hub that this is no adapter."""
    folder = Path(model)
    return model == "embedded" or (folder.is_dir() and not (folder / "adapter_config.json").is_file())
