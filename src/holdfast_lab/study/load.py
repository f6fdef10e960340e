"""From a study file, or a mapping, to a checked `StudyConfig`; every problem is reported at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from holdfast.core.errors import ConfigError
from holdfast.records.yaml_file import read_yaml
from holdfast.runs.config.load import OWNED, put_override
from holdfast.runs.config.problems import Problem, check_fields, from_pydantic, raise_problems
from holdfast_lab.study.schema import DefenseEntry, StudyConfig, block_at


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
    try:
        study = StudyConfig.model_validate(_normalised(raw, folder or Path()))
    except ValidationError as error:
        raise_problems(from_pydantic(error, block_at=block_at), where)
        raise  # never reached: pydantic found something
    raise_problems(_check_defenses(study), where)
    return study


def _normalised(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The study with folders of models and judge made absolute, so that they mean the same to a worker.

    Options that stand beside a defense's name, as in a run file, move under `options`.
    """

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
        if not isinstance(block, Mapping):
            return block
        changes = {"models": model, "defenses": _with_options, "grids": grid}
        lists = {key: change for key, change in changes.items() if isinstance(block.get(key), list)}
        return {**block, **{key: [change(entry) for entry in block[key]] for key, change in lists.items()}}

    changed: dict[str, Any] = grid(raw)
    protocol = raw.get("protocol")
    evaluation = protocol.get("evaluation") if isinstance(protocol, Mapping) else None
    if isinstance(protocol, Mapping) and isinstance(evaluation, Mapping) and "judge" in evaluation:
        changed["protocol"] = {**protocol, "evaluation": {**evaluation, "judge": locate(evaluation["judge"])}}
    return changed


def _with_options(entry: Any) -> Any:
    from dataclasses import fields

    from holdfast.training.hooks import DEFENSES

    if not isinstance(entry, Mapping) or entry.get("name") not in DEFENSES:
        return entry
    own = {f.name for f in fields(DEFENSES[entry["name"]].Config)} - set(DefenseEntry.model_fields)
    beside = {key: value for key, value in entry.items() if key in own}
    written = entry.get("options", {})
    if not beside or not isinstance(written, Mapping) or set(beside) & set(written):
        return entry
    return {**{key: value for key, value in entry.items() if key not in own}, "options": {**beside, **written}}


def _check_defenses(study: StudyConfig) -> list[Problem]:
    problems: dict[Problem, None] = {}
    lists = [("defenses", study.defenses)]
    lists += [(f"grids.{i}.defenses", grid.defenses) for i, grid in enumerate(study.grids) if grid.defenses]
    for key, entries in lists:
        for position, entry in enumerate(entries):
            problems |= dict.fromkeys(_check_entry(entry, f"{key}.{position}"))
    return list(problems)


def _check_entry(entry: DefenseEntry, key: str) -> list[Problem]:
    from holdfast.constraint.chance import ChanceConstraint
    from holdfast.training.config import SafeSFTConfig
    from holdfast.training.hooks import DEFENSES

    problems = _check_block(entry.constraint, ChanceConstraint, f"{key}.constraint")
    problems += _check_stage(entry, key)
    if entry.name in DEFENSES and not problems:
        problems += _check_block(entry.options, DEFENSES[entry.name].Config, f"{key}.options")
    _, found = check_fields(entry.train, SafeSFTConfig, f"{key}.train", OWNED)
    return problems + found


def _check_stage(entry: DefenseEntry, key: str) -> list[Problem]:
    """An alignment-stage defense is named twice: as the row, and as what aligns its model."""
    from holdfast.training.hooks import DEFENSES

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
