"""From a run file, or a mapping, to a checked `RunConfig`; every problem is reported at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from holdfast.config.fields import check_fields
from holdfast.config.presets import (
    spread_constraint,
    with_default_unit,
    with_defaults,
    with_preset,
    with_protocol_data,
)
from holdfast.config.problems import Problem, from_pydantic, raise_problems
from holdfast.config.safety_sets import (
    NAMED_PROMPTS,
    SafetyBlock,
    is_single,
    with_default_limits,
    with_safety_sets,
)
from holdfast.config.schema import RunConfig
from holdfast.config.together import check_together
from holdfast.core.errors import ConfigError
from holdfast.records.yaml_file import parse_yaml, read_yaml

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
    """Read and check a run file.

    Args:
        path: the YAML file. Relative data and model paths in it are relative to its folder.
        overrides: `key.path=value` strings, put over the file before it is checked; values are YAML.
    """
    path = Path(path)
    raw = read_yaml(path)
    for override in overrides:
        put_override(raw, override)
    where = f"{path} with {' '.join(overrides)}" if overrides else str(path)
    return config_from_dict(raw, folder=path.parent, where=where)


def config_from_dict(
    raw: Mapping[str, Any], *, folder: Path | None = None, where: str = "settings", complete: bool = False
) -> RunConfig:
    """Check settings given as a mapping of the same shape as a run file.

    Args:
        raw: the settings.
        folder: what relative paths in it are relative to.
        where: what messages call it.
        complete: whether `train` says all that it means to: what it leaves out is TRL's, not a run file's default.
    """
    raw = with_safety_sets(_with_absolute_paths(raw, folder or Path()))
    raw = with_default_unit(with_protocol_data(with_preset(raw)))
    raw = raw if complete else with_defaults(raw)
    single = is_single(raw.get("safety"), SafetyBlock)
    shared = single or is_single(raw.get("constraint", {}))
    raw = with_default_limits(spread_constraint(raw))
    problems: list[Problem] = []
    checked, problems_of_blocks = _check_blocks(raw, shared)
    try:
        config = RunConfig.model_validate({**raw, **checked})
    except ValidationError as error:
        problems += from_pydantic(error, single)
    else:
        problems += check_together(config)
    raise_problems(problems + problems_of_blocks, where)
    return config


def put_override(raw: dict[str, Any], override: str) -> None:
    """Put one `key.path=value` into the settings."""
    path, equals, text = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r}: expected key=value", remedy="for example train.learning_rate=1e-4")
    block = raw
    for depth, key in enumerate(keys[:-1]):
        inner = block.get(key)
        if inner is None:
            inner = {}
        elif keys[: depth + 1] == ["defense"] and isinstance(inner, str):
            inner = {"name": inner}
        elif keys[: depth + 1] == ["task"] and isinstance(inner, str):
            inner = {"data": inner}
        elif not isinstance(inner, dict):
            raise ConfigError(
                f"override {override!r}: {'.'.join(keys[: depth + 1])} is a value, not a block",
                remedy=f"override {'.'.join(keys[: depth + 1])} itself",
            )
        block[key] = inner
        block = inner
    block[keys[-1]] = parse_yaml(text, f"override {override!r}")


def _with_absolute_paths(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The settings with data and model paths made absolute, so that they mean the same from anywhere.

    A task that is written as one word is its file.
    """

    def locate(value: Any, *, suffixes: tuple[str, ...]) -> Any:
        if not isinstance(value, str) or not value:
            return value
        is_path = value.endswith(suffixes) or value.startswith((".", "/")) or (folder / value).exists()
        return str((folder / value).resolve()) if is_path else value

    def source(value: Any) -> Any:
        return value if value in NAMED_PROMPTS else locate(value, suffixes=DATA_SUFFIXES)

    def block(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        data = {"data": locate(value["data"], suffixes=DATA_SUFFIXES)} if "data" in value else {}
        asked = value.get("prompts")
        return {**value, **data, **({"prompts": [source(one) for one in asked]} if isinstance(asked, list) else {})}

    changed = {**raw}
    if "model" in raw and raw["model"] != "embedded":
        changed["model"] = locate(raw["model"], suffixes=("/",))
    if isinstance(raw.get("unaligned"), str) and raw["unaligned"] != "embedded":
        changed["unaligned"] = locate(raw["unaligned"], suffixes=("/",))
    if isinstance(raw.get("task"), str):
        changed["task"] = {"data": raw["task"]}
    for key in ("task", "harmful"):
        if key in changed:
            changed[key] = block(changed[key])
    conflicts, screening = raw.get("conflicts"), raw.get("screening")
    if isinstance(conflicts, Mapping) and isinstance(ids := conflicts.get("learn"), str) and ids:
        changed["conflicts"] = {**conflicts, "learn": str((folder / ids).resolve())}
    if isinstance(screening, Mapping) and "judge" in screening:
        changed["screening"] = {**screening, "judge": locate(screening["judge"], suffixes=("/",))}
    safety = raw.get("safety")
    if isinstance(safety, Mapping):
        single = is_single(safety, SafetyBlock)
        changed["safety"] = block(safety) if single else {name: block(inner) for name, inner in safety.items()}
    return changed


def _check_blocks(raw: Mapping[str, Any], shared: bool) -> tuple[dict[str, Any], list[Problem]]:
    """Check the blocks that mirror dataclasses; these come with torch and TRL, hence the late imports."""
    from holdfast.trainers.config import SafeSFTConfig

    checked: dict[str, Any] = {}
    problems: list[Problem] = []
    if isinstance(train := raw.get("train"), Mapping):
        checked["train"], found = check_fields(train, SafeSFTConfig, "train", OWNED)
        problems += found
    if isinstance(constraint := raw.get("constraint"), Mapping):
        checked["constraint"], found = _check_constraints(constraint, shared)
        problems += found
    found_options, found = _check_defense(raw)
    return {**checked, **found_options}, problems + found


def _check_constraints(constraint: Mapping[str, Any], shared: bool) -> tuple[dict[str, Any], list[Problem]]:
    from holdfast.constraint.chance import ChanceConstraint

    checked: dict[str, Any] = {}
    problems: dict[Problem, None] = {}
    for name, block in constraint.items():
        # One block written for all sets is reported once, under the key it was written at.
        key = "constraint" if shared else f"constraint.{name}"
        checked[name] = block
        if not isinstance(block, Mapping):
            continue
        checked[name], found = check_fields(block, ChanceConstraint, key)
        found += _construction_problem(ChanceConstraint, checked[name], key)
        problems |= dict.fromkeys(found)
    return checked, list(problems)


def _check_defense(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    from holdfast.trainers.hooks import DEFENSES, with_paper_constants

    written = raw.get("defense", "holdfast")
    name = written.get("name", "holdfast") if isinstance(written, Mapping) else written
    if not isinstance(name, str):
        return {}, [Problem("defense", "expected a name, or a mapping with `name:`", "for example defense: holdfast")]
    options = {key: value for key, value in written.items() if key != "name"} if isinstance(written, Mapping) else {}
    filter_ = raw.get("filter", {})
    try:
        cls = DEFENSES[name]
        options = with_paper_constants(cls, options)
    except ConfigError as error:
        return {}, [Problem("defense", error.what, error.remedy)]
    if not isinstance(filter_, Mapping):
        return {}, []
    if filter_ and name != "holdfast":
        return {}, [Problem("filter", f"only the defense holdfast has a filter, found {name!r}", "remove `filter`")]
    if twice := sorted(set(filter_) & set(options)):
        return {}, [Problem("filter", f"{', '.join(twice)} also given under `defense`", "keep one of the two")]
    options, problems = check_fields(options, cls.Config, "defense")
    filter_, more = check_fields(filter_, cls.Config, "filter")
    problems += more
    problems += _construction_problem(cls.Config, options | filter_, "filter" if filter_ else "defense")
    return {"defense": {"name": name, "options": options}, "filter": filter_}, problems


def _construction_problem(cls: Any, values: Mapping[str, Any], key: str) -> list[Problem]:
    """What the class itself refuses: it knows the valid ranges."""
    try:
        cls(**values)
    except ConfigError as error:
        return [Problem(key, error.what.removeprefix(f"{key}: "), error.remedy)]
    return []
