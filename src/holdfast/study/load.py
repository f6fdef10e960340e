"""From a study file, or a mapping, to a checked `StudyConfig`; every problem is reported at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from holdfast.config.fields import check_fields
from holdfast.config.load import OWNED, put_override
from holdfast.config.problems import Problem, from_pydantic, raise_problems
from holdfast.core.errors import ConfigError
from holdfast.records.yaml_file import read_yaml
from holdfast.study.schema import DefenseEntry, StudyConfig, block_at


def load_study(path: str | Path, overrides: Sequence[str] = ()) -> StudyConfig:
    """Read and check a study file.

    Args:
        path: the YAML file. Folders of models and of a judge in it are relative to its folder.
        overrides: `key.path=value` strings, put over the file before it is checked; values are YAML.
    """
    path = Path(path)
    raw = read_yaml(path)
    for override in overrides:
        put_override(raw, override)
    where = f"{path} with {' '.join(overrides)}" if overrides else str(path)
    return study_from_dict(raw, folder=path.parent, where=where)


def study_from_dict(raw: Mapping[str, Any], *, folder: Path | None = None, where: str = "study") -> StudyConfig:
    """Check a study given as a mapping of the same shape as a study file."""
    raw = _with_options(raw)
    try:
        study = StudyConfig.model_validate(_with_absolute_paths(raw, folder or Path()))
    except ValidationError as error:
        raise_problems(from_pydantic(error, block_at=block_at), where)
        raise  # never reached: pydantic found something
    raise_problems(_check_defenses(study), where)
    return study


def _with_options(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The study with options that stand beside a defense's name, as in a run file, moved under `options`."""
    from dataclasses import fields

    from holdfast.trainers.hooks import DEFENSES

    def entry(value: Any) -> Any:
        if not isinstance(value, Mapping) or value.get("name") not in DEFENSES:
            return value
        own = {f.name for f in fields(DEFENSES[value["name"]].Config)} - set(DefenseEntry.model_fields)
        beside = {key: inner for key, inner in value.items() if key in own}
        written = value.get("options", {})
        if not beside or not isinstance(written, Mapping) or set(beside) & set(written):
            return value
        return {**{key: inner for key, inner in value.items() if key not in own}, "options": {**beside, **written}}

    def block(value: Any) -> Any:
        if not isinstance(value, Mapping) or not isinstance(value.get("defenses"), list):
            return value
        return {**value, "defenses": [entry(inner) for inner in value["defenses"]]}

    changed: dict[str, Any] = dict(block(raw))
    if isinstance(raw.get("grids"), list):
        changed["grids"] = [block(inner) for inner in raw["grids"]]
    return changed


def _with_absolute_paths(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The study with model and judge folders made absolute, so that they mean the same to a worker."""

    def locate(ref: Any) -> Any:
        if not isinstance(ref, str) or ref in ("", "embedded"):
            return ref
        is_path = ref.startswith((".", "/")) or (folder / ref).exists()
        return str((folder / ref).resolve()) if is_path else ref

    def model(entry: Any) -> Any:
        if isinstance(entry, Mapping):
            return {**entry, "ref": locate(entry["ref"])} if "ref" in entry else entry
        return locate(entry)

    def grid(block: Any) -> Any:
        if not isinstance(block, Mapping) or not isinstance(block.get("models"), list):
            return block
        return {**block, "models": [model(entry) for entry in block["models"]]}

    changed: dict[str, Any] = dict(grid(raw))
    protocol = raw.get("protocol")
    evaluation = protocol.get("evaluation") if isinstance(protocol, Mapping) else None
    if isinstance(protocol, Mapping) and isinstance(evaluation, Mapping) and "judge" in evaluation:
        changed["protocol"] = {**protocol, "evaluation": {**evaluation, "judge": locate(evaluation["judge"])}}
    if isinstance(raw.get("grids"), list):
        changed["grids"] = [grid(block) for block in raw["grids"]]
    return changed


def _check_defenses(study: StudyConfig) -> list[Problem]:
    """Settings of every defense that this version has; of the others only the names are looked at, later."""
    problems: dict[Problem, None] = {}
    lists = [("defenses", study.defenses)]
    lists += [(f"grids.{i}.defenses", grid.defenses) for i, grid in enumerate(study.grids) if grid.defenses]
    for key, entries in lists:
        for position, entry in enumerate(entries):
            problems |= dict.fromkeys(_check_entry(entry, f"{key}.{position}"))
    return list(problems)


def _check_entry(entry: DefenseEntry, key: str) -> list[Problem]:
    from holdfast.constraint.chance import ChanceConstraint
    from holdfast.trainers.config import SafeSFTConfig
    from holdfast.trainers.hooks import DEFENSES

    problems: list[Problem] = []
    if entry.filter and entry.name != "holdfast":
        problems.append(Problem(f"{key}.filter", f"only holdfast has a filter, found {entry.name!r}", "use `options`"))
    if twice := sorted(set(entry.filter) & set(entry.options)):
        problems.append(Problem(f"{key}.filter", f"{', '.join(twice)} also in `options`", "keep one of the two"))
    problems += _check_block(entry.constraint, ChanceConstraint, f"{key}.constraint")
    problems += _check_stage(entry, key)
    if entry.name in DEFENSES and not problems:
        config = DEFENSES[entry.name].Config
        problems += _check_block(entry.options, config, f"{key}.options")
        problems += _check_block(entry.filter, config, f"{key}.filter")
    _, found = check_fields(entry.train, SafeSFTConfig, f"{key}.train", OWNED)
    return problems + found


def _check_stage(entry: DefenseEntry, key: str) -> list[Problem]:
    """An alignment-stage defense is named twice: as the row, and as what aligns its model."""
    from holdfast.trainers.hooks import DEFENSES

    if entry.align in DEFENSES and "align" not in DEFENSES[entry.align].stages:
        return [Problem(f"{key}.align", f"{entry.align} does not act in the alignment stage", "use sft")]
    if entry.name not in DEFENSES or DEFENSES[entry.name].stages != ("align",):
        return []
    if entry.align != entry.name:
        what = f"{entry.name} acts in the alignment stage, but this row's model is aligned by {entry.align}"
        return [Problem(key, what, f"write {{name: {entry.name}, align: {entry.name}}}")]
    if entry.options:
        remedy = f"set protocol.align.options: {{{entry.name}: ...}}, which all rows of that alignment share"
        return [Problem(f"{key}.options", f"{entry.name} acts in the alignment stage", remedy)]
    return []


def _check_block(values: Mapping[str, Any], cls: Any, key: str) -> list[Problem]:
    checked, problems = check_fields(values, cls, key)
    try:
        cls(**checked)
    except ConfigError as error:
        problems.append(Problem(key, error.what.removeprefix("constraint: "), error.remedy))
    return problems
