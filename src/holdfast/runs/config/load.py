"""From a run file, or a mapping, to a checked `RunConfig`; every problem is reported at once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from holdfast.core.errors import ConfigError
from holdfast.defaults import LATER_OPTIONS
from holdfast.records.yaml_file import parse_yaml, read_yaml
from holdfast.runs.config.blocks import NAMED_PROMPTS, SafetyBlock, is_single
from holdfast.runs.config.cross_checks import check_together
from holdfast.runs.config.presets import defense_name, filled
from holdfast.runs.config.problems import Problem, check_block, check_fields, from_pydantic, raise_problems
from holdfast.runs.config.schema import RunConfig

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".gz")
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
    written, options = values.get("defense"), values.pop("filter", None)
    if not isinstance(written, Mapping):
        return dict(stored)
    defense = {**written, **(options if isinstance(options, Mapping) else {})}
    return {**values, "defense": {**LATER_OPTIONS, **defense} if "trust_region" in defense else defense}


def config_from_dict(
    raw: Mapping[str, Any], *, folder: Path | None = None, where: str = "settings", complete: bool = False
) -> RunConfig:
    """Check settings given as a mapping of the same shape as a run file; relative paths are relative to `folder`.

    With `complete`, `train` says all that it means to: what it leaves out is TRL's, not a run file's default.
    """
    shared = is_single(raw.get("constraint", {}))
    raw = filled(_with_absolute_paths(raw, folder or Path()), complete=complete)
    single = is_single(raw["safety"], SafetyBlock)
    checked, problems = _check_blocks(raw, single or shared)
    try:
        config = RunConfig.model_validate({**raw, **checked})
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
    for depth, key in enumerate(keys[:-1]):
        inner = {} if block.get(key) is None else block[key]
        if depth == 0 and key in ("defense", "task") and isinstance(inner, str):  # one word stands for a block
            inner = {"name" if key == "defense" else "data": inner}
        elif not isinstance(inner, dict):
            what = f"override {override!r}: {'.'.join(keys[: depth + 1])} is a value, not a block"
            raise ConfigError(what, remedy=f"override {'.'.join(keys[: depth + 1])} itself")
        block[key] = inner
        block = inner
    block[keys[-1]] = parse_yaml(text, f"override {override!r}")


def _with_absolute_paths(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The settings with data and model paths made absolute, so that they mean the same from anywhere.

    A task that is written as one word is its file.
    """

    def locate(value: Any, *suffixes: str) -> Any:
        if not isinstance(value, str) or not value:
            return value
        is_path = value.endswith(suffixes) or value.startswith((".", "/")) or (folder / value).exists()
        return str((folder / value).resolve()) if is_path else value

    def block(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        data = {"data": locate(value["data"], *DATA_SUFFIXES)} if "data" in value else {}
        asked = value.get("prompts")
        if isinstance(asked, list):
            data["prompts"] = [name if name in NAMED_PROMPTS else locate(name, *DATA_SUFFIXES) for name in asked]
        return {**value, **data}

    changed = {**raw, "task": {"data": raw["task"]}} if isinstance(raw.get("task"), str) else {**raw}
    changed |= {key: locate(raw[key], "/") for key in ("model", "unaligned") if raw.get(key) not in (None, "embedded")}
    changed |= {key: block(changed[key]) for key in ("task", "harmful") if key in changed}
    conflicts, screening, safety = raw.get("conflicts"), raw.get("screening"), raw.get("safety")
    if isinstance(conflicts, Mapping) and isinstance(ids := conflicts.get("learn"), str) and ids:
        changed["conflicts"] = {**conflicts, "learn": str((folder / ids).resolve())}
    if isinstance(screening, Mapping) and "judge" in screening:
        changed["screening"] = {**screening, "judge": locate(screening["judge"], "/")}
    if isinstance(safety, Mapping):
        single = is_single(safety, SafetyBlock)
        changed["safety"] = block(safety) if single else {name: block(inner) for name, inner in safety.items()}
    return changed


def _check_blocks(raw: Mapping[str, Any], shared: bool) -> tuple[dict[str, Any], list[Problem]]:
    """Check the blocks that mirror dataclasses; these come with torch and TRL, hence the late imports."""
    from holdfast.constraint.chance import ChanceConstraint
    from holdfast.training.config import SafeSFTConfig
    from holdfast.training.step import ENGINES

    checked: dict[str, Any] = {}
    problems: dict[Problem, None] = {}  # one block written for all sets is reported once, at the key where it stands
    if isinstance(train := raw.get("train"), Mapping):
        checked["train"], found = check_fields(train, SafeSFTConfig, "train", OWNED, {"step": ("auto", *ENGINES)})
        problems |= dict.fromkeys(found)
    if isinstance(limits := raw.get("constraint"), Mapping):
        checked["constraint"] = dict(limits)
        for name, block in ((name, block) for name, block in limits.items() if isinstance(block, Mapping)):
            key = "constraint" if shared else f"constraint.{name}"
            checked["constraint"][name], found = check_block(block, ChanceConstraint, key)
            problems |= dict.fromkeys(found)
    block, found = _check_defense(raw)
    return {**checked, **block}, [*problems, *found]


def _check_defense(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    from holdfast.training.hooks import DEFENSES, with_paper_constants

    written, name = raw.get("defense"), defense_name(raw)
    if not isinstance(name, str):
        return {}, [Problem("defense", "expected a name, or a mapping with `name:`", "for example defense: holdfast")]
    options = {key: value for key, value in written.items() if key != "name"} if isinstance(written, Mapping) else {}
    try:
        cls = DEFENSES[name]
        options = with_paper_constants(cls, options)
    except ConfigError as error:
        return {}, [Problem("defense", error.what, error.remedy)]
    options, problems = check_block(options, cls.Config, "defense")
    return {"defense": {"name": name, "options": options}}, problems
