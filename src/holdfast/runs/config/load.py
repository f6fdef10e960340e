"""From a run file, or a mapping, to a checked `RunConfig`; every problem is reported at once."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from holdfast.core.errors import ConfigError
from holdfast.core.registry import nearest
from holdfast.defaults import LATER_OPTIONS
from holdfast.records.yaml_file import parse_yaml, read_yaml
from holdfast.runs.config.blocks import NAMED_PROMPTS, SafetyBlock, is_single, on_protocol_data
from holdfast.runs.config.presets import defense_name, filled, safety_sets
from holdfast.runs.config.problems import Problem, check_block, check_fields, from_pydantic, raise_problems
from holdfast.runs.config.schema import RunConfig

OWNED = {
    "output_dir": "set `output_dir` at the top of the run file",
    "run_dir": "set `output_dir` at the top of the run file",
    "seed": "set `seed` at the top of the run file",
    "safety_seed": "set `seed` at the top of the run file",
    "safety_fractions": "set `safety.fractions`",
    "on_leak": "set `safety.on_leak`",
    "model_init_kwargs": "set `model`, `revision`, `dtype` and `quantization` at the top of the run file",
    "stage": "set `stage` at the top of the run file",
    "resume_from_checkpoint": "use `holdfast train --resume`",
    "trust_remote_code": "only `--trust-remote-code` on the command line allows it",
    "hub_token": "put the token into the environment variable HF_TOKEN",
}
"""Fields of the trainer's settings that the run file sets elsewhere."""
MIRRORED = ("train", "constraint", "defense")
"""Blocks that mirror dataclasses, which come with torch and TRL."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a run file, with `key.path=value` overrides put over it; values are YAML.

    Relative data and model paths in it are relative to its folder.
    """
    raw, where = read_settings(Path(path), overrides)
    return config_from_dict(raw, folder=Path(path).parent, where=where)


def read_settings(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], str]:
    """A YAML file with `key.path=value` overrides put over it, and what messages call the two."""
    raw = read_yaml(path)
    for override in overrides:
        put_override(raw, override)
    return raw, f"{path} with {' '.join(overrides)}" if overrides else str(path)


def stored_config(path: Path) -> RunConfig:
    """The settings that a run stored as its `config.yaml`, by this version or an earlier one."""
    return config_from_dict(todays_spelling(read_yaml(path)), folder=path.parent, where=str(path))


def todays_spelling(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Stored settings with the filter's options under `defense`: they had a block of their own before version 0.2.

    Options that did not exist then are filled in, as they are when they are off.
    """
    values = dict(stored)
    if isinstance(values.get("defense"), Mapping):
        options = values.pop("filter", None)
        defense = {**values["defense"], **(options if isinstance(options, Mapping) else {})}
        values["defense"] = {**LATER_OPTIONS, **defense} if "trust_region" in defense else defense
    return values


def config_from_dict(
    raw: Mapping[str, Any], *, folder: Path | None = None, where: str = "settings", complete: bool = False
) -> RunConfig:
    """Check settings given as a mapping of the same shape as a run file; relative paths are relative to `folder`.

    With `complete`, `train` says all that it means to: what it leaves out is TRL's, not a run file's default.
    """
    shared = is_single(raw.get("constraint", {}))
    if isinstance(raw.get("task"), str):  # a task that is written as one word is its file
        raw = {**raw, "task": {"data": raw["task"]}}
    if set(raw) - set(RunConfig.model_fields) and not set(raw) & set(MIRRORED):
        _refuse_without_torch(raw, folder, where)
    raw = filled(raw, complete=complete)
    single = is_single(raw["safety"], SafetyBlock)
    checked, problems = _check_blocks(raw, single or shared)
    try:
        config = RunConfig.model_validate({**raw, **checked}, context=folder or Path())
    except ValidationError as error:
        raise_problems(from_pydantic(error, single) + problems, where)
        raise
    raise_problems(check_together(config) + problems, where)
    return config


def put_override(raw: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r}: expected key=value", remedy="for example train.learning_rate=1e-4")
    block = raw
    for depth, key in enumerate(keys[:-1], start=1):
        inner = {} if block.get(key) is None else block[key]
        if depth == 1 and key in ("defense", "task") and isinstance(inner, str):  # one word stands for a block
            inner = {"name" if key == "defense" else "data": inner}
        elif not isinstance(inner, dict):
            place = ".".join(keys[:depth])
            what = f"override {override!r}: {place} is a value, not a block"
            raise ConfigError(what, remedy=f"override {place} itself")
        block[key] = inner
        block = inner
    block[keys[-1]] = parse_yaml(text, f"override {override!r}")


def _refuse_without_torch(raw: Mapping[str, Any], folder: Path | None, where: str) -> None:
    """Refuse a mistyped key, with every other problem, where no block is written that only torch can check."""
    safety = safety_sets(raw)
    try:
        RunConfig.model_validate({**raw, "safety": safety, "constraint": {}}, context=folder or Path())
    except ValidationError as error:
        raise_problems(from_pydantic(error, is_single(safety, SafetyBlock)), where)


def _check_blocks(raw: Mapping[str, Any], shared: bool) -> tuple[dict[str, Any], list[Problem]]:
    """Check the blocks of `MIRRORED`; hence the late imports."""
    from holdfast.constraint.chance import ChanceConstraint
    from holdfast.training.config import SafeSFTConfig
    from holdfast.training.step import ENGINES

    checked: dict[str, Any] = {}
    problems: dict[Problem, None] = {}  # one block written for all sets is reported once, at the key where it stands
    if isinstance(train := raw.get("train"), Mapping):
        checked["train"], wrong = check_fields(train, SafeSFTConfig, "train", OWNED, {"step": ("auto", *ENGINES)})
        problems |= dict.fromkeys(wrong)
    if isinstance(limits := raw.get("constraint"), Mapping):
        checked["constraint"] = dict(limits)
        for name, block in ((name, block) for name, block in limits.items() if isinstance(block, Mapping)):
            key = "constraint" if shared else f"constraint.{name}"
            checked["constraint"][name], wrong = check_block(block, ChanceConstraint, key)
            problems |= dict.fromkeys(wrong)
    block, wrong = _check_defense(raw)
    return {**checked, **block}, [*problems, *wrong]


def _check_defense(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    from holdfast.training.hooks import DEFENSES, with_paper_constants

    written, name = raw.get("defense"), defense_name(raw)
    if not isinstance(name, str):
        return {}, [Problem("defense", "expected a name, or a mapping with `name:`", "for example defense: holdfast")]
    options = {key: value for key, value in written.items() if key != "name"} if isinstance(written, Mapping) else {}
    try:
        cls = DEFENSES[name]
        options, problems = check_block(with_paper_constants(cls, options), cls.Config, "defense")
    except ConfigError as error:
        return {}, [Problem("defense", error.what, error.remedy)]
    return {"defense": {"name": name, "options": options}}, problems


def check_together(config: RunConfig) -> list[Problem]:
    """Every contradiction between blocks that are each valid."""
    parts = (_shape, _defense, _asking, _data)
    return [Problem(*entry) for part in parts for entry in part(config)]


Found = Iterator[tuple[str, str, str]]  # key, what is wrong, and the remedy


def _refused(key: str, look_up: Any, *arguments: Any) -> Found:
    try:
        look_up(*arguments)
    except ConfigError as error:
        yield key, error.what, error.remedy


def _shape(config: RunConfig) -> Found:
    if set(config.constraint) != set(config.safety):
        expected, found = ", ".join(config.safety), ", ".join(config.constraint)
        what = f"expected the names of the safety sets ({expected}), found {found}"
        yield "constraint", what, "name them alike, or write one block for all"
    continued = "continue goes on training an adapter, "
    if config.adapter_policy == "continue" and (config.lora is None or config.quantization is not None):
        what = "`lora: null`" if config.lora is None else f"quantization {config.quantization}"
        yield "adapter_policy", f"{continued}which {what} rules out", "use merge"
    elif config.adapter_policy == "continue" and _is_full_model(config.model):
        yield "adapter_policy", f"{continued}and {config.model} is none", "use merge"
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
        what = f"{name} needs the weights before alignment, and the model is no adapter"
        yield "unaligned", what, "name the model it was aligned from: `unaligned: owner/base`"


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
        what = "conflicts are found by asking the model, and a run on the protocol's pairs or in alignment does not"
        yield "conflicts", what, "use `safety: auto`, or remove `conflicts`"
    from holdfast.judging.engines import AUTO, ENGINES, require_options
    from holdfast.judging.judge import open_judge

    engine, options, judge = config.screening.engine, config.screening.engine_options, config.screening.judge
    if engine == AUTO and options:
        yield "screening.engine_options", "the engine auto has none", "name the engine that they belong to"
    elif engine != AUTO:
        unknown = list(_refused("screening.engine", ENGINES.__getitem__, engine))
        yield from unknown or _refused("screening.engine_options", require_options, engine, options)
    if judge is not None and not Path(judge).is_absolute():  # a folder is read when it judges, not when read back
        yield from _refused("screening.judge", open_judge, judge)


def _prompts(block: SafetyBlock) -> Iterator[tuple[str, str]]:
    prompts = block.prompts or []
    for name in prompts:
        if name not in NAMED_PROMPTS and "/" not in name:  # files have absolute paths by now
            what = f"{name!r} is none of {', '.join(NAMED_PROMPTS)}, no file and no hub data set (owner/name)"
            yield what, nearest(name, list(NAMED_PROMPTS))
    if twice := sorted({name for name in prompts if prompts.count(name) > 1}):
        yield f"{twice[0]!r} is listed twice", "list it once"
    fine = [name for name in ("everyday", "borderline") if name in prompts]
    if block.keep == "refusals" and fine:
        what = f"refusals of {' and '.join(fine)} prompts are never held: the model should answer them"
        yield what, f"remove {', '.join(fine)}, or put it into a set with `keep: answers`"


def _data(config: RunConfig) -> Found:
    from holdfast.data.tasks import TASKS

    if config.roles is not None and not on_protocol_data({"task": config.task.model_dump()}):
        yield "roles", "the task names its own data", "give `task: {name: ...}`, or remove `roles`"
    if config.task.name is not None:
        yield from _refused("task.name", TASKS.__getitem__, config.task.name)
    if config.harmful is not None and config.harmful.role is not None and config.roles is None:
        yield "harmful", "`role: harmful` is the protocol's, the task names its own data", "give `data`"
