"""Study files: what they may say, and from one, or from a mapping, to a checked `StudyConfig`.

`protocol` is a free mapping here: `holdfast_lab.study.protocol` knows its fields. The blocks `options`, `constraint`
and `train` of a defense mirror dataclasses elsewhere. Every problem is reported at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo, model_validator

from holdfast.runs.config.blocks import Block, Number
from holdfast.runs.config.load import OWNED, read_settings
from holdfast.runs.config.problems import Problem, check_block, check_fields, from_pydantic, raise_problems

MAX_LABEL = 60
Ratio = Annotated[Number, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0)]


def locate(ref: str, info: ValidationInfo) -> str:
    """A folder relative to the study's, which is the context, made absolute: it means the same to a worker."""
    folder = info.context or Path()
    is_path = ref.startswith((".", "/")) or (folder / ref).exists()
    return str((folder / ref).resolve()) if is_path and ref not in ("", "embedded") else ref


def _judge_located(protocol: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    evaluation = protocol.get("evaluation")
    if not isinstance(evaluation, Mapping) or not isinstance(evaluation.get("judge"), str):
        return protocol
    return {**protocol, "evaluation": {**evaluation, "judge": locate(evaluation["judge"], info)}}


def _printable(value: str) -> str:
    if len(value) > MAX_LABEL or not value.isprintable():
        raise ValueError(f"expected at most {MAX_LABEL} printable characters")
    return value


Printed = Annotated[str, AfterValidator(_printable)]


class ModelBlock(Block):
    """A model: `ref` is a hub id, a folder (relative to the study file) or `embedded`."""

    ref: Annotated[str, Field(min_length=1), AfterValidator(locate)]
    # its name in tables; the last part of `ref` unless given
    name: str | None = Field(default=None, min_length=1, max_length=MAX_LABEL)
    revision: str | None = None


class DefenseEntry(Block):
    """A row of the tables: a defense with its settings, on a model aligned by `align`."""

    name: str = Field(min_length=1)
    label: Printed | None = None  # the row's name in tables; the defense's own unless given
    setting: Printed = ""  # what sets this row apart from others with its label, for example `tau=0.05`
    preset: Literal["paper"] | None = None
    align: str = Field(default="sft", min_length=1)  # what the model is aligned by: `sft`, or a defense of that stage
    options: dict[str, Any] = Field(default_factory=dict)
    constraint: dict[str, Any] = Field(default_factory=dict)
    train: dict[str, Any] = Field(default_factory=dict)  # put over the protocol's `train`, for this row only

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, entry: object) -> object:
        """Options that stand beside a defense's name, as in a run file, move under `options`."""
        if not isinstance(entry, Mapping) or set(entry) <= set(cls.model_fields):
            return entry
        from holdfast.training.hooks import DEFENSES  # takes seconds, which a study of plain names need not wait

        if entry.get("name") not in DEFENSES:
            return entry
        own = {f.name for f in fields(DEFENSES[entry["name"]].Config)} - set(cls.model_fields)
        beside, written = {key: entry[key] for key in entry if key in own}, entry.get("options", {})
        if not beside or not isinstance(written, Mapping) or set(beside) & set(written):
            return entry
        return {**{key: entry[key] for key in entry if key not in own}, "options": {**beside, **written}}


def _named(key: str, value: object) -> object:
    """A list in which a plain name stands for a block with that `key`."""
    if not isinstance(value, list):
        return value
    return [{key: entry} if isinstance(entry, str) else entry for entry in value]


Models = Annotated[list[ModelBlock], Field(min_length=1), BeforeValidator(partial(_named, "ref"))]
Defenses = Annotated[list[DefenseEntry], Field(min_length=1), BeforeValidator(partial(_named, "name"))]


class Grid(Block):
    """A further grid; a key that is left out comes from the top of the file."""

    models: Models | None = None
    tasks: list[str] | None = Field(default=None, min_length=1)
    defenses: Defenses | None = None
    poison_ratios: list[Ratio] | None = Field(default=None, min_length=1)
    seeds: list[Seed] | None = Field(default=None, min_length=1)


class StudyConfig(Block):
    """One study. Build it with `load_study` or `study_from_dict`, which check every block."""

    preset: Literal["small", "paper"] = "small"  # the protocol's constants; `protocol` is put over them
    models: Models
    tasks: list[str] = Field(min_length=1)
    defenses: Defenses
    poison_ratios: list[Ratio] = Field(default=[0.5], min_length=1)
    seeds: list[Seed] = Field(default=[42], min_length=1)
    grids: list[Grid] = Field(default_factory=list)
    references: bool = True  # also the base model and the aligned models, on every task on which a defense is measured
    protocol: Annotated[dict[str, Any], AfterValidator(_judge_located)] = Field(default_factory=dict)
    engine: Literal["local", "ray"] = "local"
    workers: int = Field(default=1, ge=1)  # cells side by side: on this machine, or with Ray on each GPU
    output_dir: str = Field(min_length=1)


def block_at(location: list[str]) -> type[Block]:
    """The block in which the last key of a location stands."""
    blocks: dict[str, type[Block]] = {"models": ModelBlock, "defenses": DefenseEntry, "grids": Grid}
    return next((blocks[part] for part in reversed(location[:-1]) if part in blocks), StudyConfig)


def load_study(path: str | Path, overrides: Sequence[str] = ()) -> StudyConfig:
    """Read and check a study file, with `key.path=value` overrides put over it; values are YAML.

    Folders of models and of a judge in it are relative to its folder.
    """
    raw, where = read_settings(Path(path), overrides)
    return study_from_dict(raw, folder=Path(path).parent, where=where)


def study_from_dict(raw: Mapping[str, Any], *, folder: Path | None = None, where: str = "study") -> StudyConfig:
    """Check a study given as a mapping of the same shape as a study file."""
    try:
        study = StudyConfig.model_validate(raw, context=folder or Path())
    except ValidationError as error:
        raise_problems(from_pydantic(error, block_at=block_at), where)
        raise  # never reached: pydantic found something
    raise_problems(_check_defenses(study), where)
    return study


def _check_defenses(study: StudyConfig) -> list[Problem]:
    lists = [("defenses", study.defenses)]
    lists += [(f"grids.{i}.defenses", grid.defenses) for i, grid in enumerate(study.grids) if grid.defenses]
    entries = [(f"{key}.{position}", entry) for key, found in lists for position, entry in enumerate(found)]
    return list(dict.fromkeys(problem for key, entry in entries for problem in _check_entry(entry, key)))


def _check_entry(entry: DefenseEntry, key: str) -> list[Problem]:
    from holdfast.constraint.chance import ChanceConstraint
    from holdfast.training.config import SafeSFTConfig
    from holdfast.training.hooks import DEFENSES

    _, problems = check_block(entry.constraint, ChanceConstraint, f"{key}.constraint")
    problems += _check_stage(entry, key)
    if entry.name in DEFENSES and not problems:
        _, problems = check_block(entry.options, DEFENSES[entry.name].Config, f"{key}.options")
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
