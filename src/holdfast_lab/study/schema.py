"""What a study file may say: grids of models, tasks, defenses, poison ratios and seeds, and how they are run.

`protocol` is a free mapping here: `holdfast_lab.study.protocol` knows its fields. The blocks `options`, `constraint`
and `train` of a defense mirror dataclasses elsewhere; `holdfast_lab.study.load` checks them.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, field_validator

from holdfast.runs.config.blocks import Block, Number

MAX_LABEL = 60
Ratio = Annotated[Number, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0)]


class ModelBlock(Block):
    """A model: `ref` is a hub id, a folder (relative to the study file) or `embedded`."""

    ref: str = Field(min_length=1)
    name: str | None = Field(default=None, min_length=1, max_length=MAX_LABEL)
    """Its name in tables; the last part of `ref` unless given."""
    revision: str | None = None


class DefenseEntry(Block):
    """A row of the tables: a defense with its settings, on a model aligned by `align`."""

    name: str = Field(min_length=1)
    label: str | None = None  # the row's name in tables; the defense's own unless given
    setting: str = ""  # what sets this row apart from others with its label, for example `tau=0.05`
    preset: Literal["paper"] | None = None
    align: str = Field(default="sft", min_length=1)
    """How the model is aligned first: `sft` on the safe pairs, or a defense of that stage."""
    options: dict[str, Any] = Field(default_factory=dict)
    constraint: dict[str, Any] = Field(default_factory=dict)
    train: dict[str, Any] = Field(default_factory=dict)  # put over the protocol's `train`, for this row only

    @field_validator("label", "setting")
    @classmethod
    def _printable(cls, value: str | None) -> str | None:
        if value is not None and (len(value) > MAX_LABEL or not value.isprintable()):
            raise ValueError(f"expected at most {MAX_LABEL} printable characters")
        return value


def _named(key: str, value: Any) -> Any:
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
    protocol: dict[str, Any] = Field(default_factory=dict)
    engine: Literal["local", "ray"] = "local"
    workers: int = Field(default=1, ge=1)  # cells side by side: on this machine, or with Ray on each GPU
    output_dir: str = Field(min_length=1)


_BLOCKS: dict[str, type[BaseModel]] = {"models": ModelBlock, "defenses": DefenseEntry, "grids": Grid}


def block_at(location: list[str]) -> type[BaseModel]:
    """The block in which the last key of a location stands."""
    inside = [part for part in location[:-1] if part in _BLOCKS]
    return _BLOCKS[inside[-1]] if inside else StudyConfig
