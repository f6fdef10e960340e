"""The protocol of a study: everything that is the same for all of its cells.

What may differ are the axes: model, task, defense with its settings, poison ratio, seed. All else is hashed, together
with the judge and the data that were really used; results with different hashes never share a table.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from holdfast.core.errors import ConfigError
from holdfast.core.registry import nearest
from holdfast.data.templates import Template
from holdfast.runs.config.blocks import Block, Number
from holdfast.runs.config.presets import PAPER, PRESETS, PROTOCOLS
from holdfast.runs.config.problems import from_pydantic, raise_problems
from holdfast.runs.config.schema import LoraBlock, RolesBlock

DEFENSE_BLOCKS = ("constraint", "defense")  # blocks of a preset that belong to a defense, not to the protocol
# Alignment differs from fine-tuning in these, and its defenses train longer (paper, 'Two-stage training').
ALIGN_TRAIN = {"learning_rate": 5e-4, "num_train_epochs": 3}
LONGER = {name: {"num_train_epochs": 20} for name in ("vaccine", "booster", "antibody")}


class AlignBlock(Block):
    """The alignment stage: plain SFT on the safe pairs, or an alignment-stage defense."""

    train: dict[str, Any] = Field(default_factory=lambda: dict(ALIGN_TRAIN))  # put over the protocol's `train`
    per_defense: dict[str, dict[str, Any]] = Field(default_factory=lambda: dict(LONGER))
    """Put over that for one alignment-stage defense."""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of alignment-stage defenses by name, over the authors' defaults (preset paper: over the paper's)."""
    seed: int = Field(default=42, ge=0)


class MeasureBlock(Block):
    """The degradation by which every defense is measured, whatever it was trained with."""

    unit: Literal["nll_token", "nll_sum", "nll_first"] = "nll_token"
    tau: Number = Field(default=0.1, ge=0)


class EvaluationBlock(Block):
    judge: str | dict[str, Any] | None = None  # of `holdfast ls judges`, a mapping with options, or a judge's folder
    harm_tokens: int = Field(default=512, ge=1)
    task_tokens: int | None = Field(default=256, ge=1)
    task_examples: int = Field(default=200, ge=1)
    over_refusal: bool = True  # also ask XSTest's safe prompts
    engine: Literal["auto", "transformers", "continuous"] = "auto"
    """What decodes. A cell holds its model in memory, so the engines that reach one elsewhere are not for studies."""
    batch_size: int = Field(default=128, ge=1)


class Protocol(Block):
    """Everything that all cells of a study share."""

    preset: Literal["paper", "small"]
    dtype: Literal["auto", "bfloat16", "float32"]
    template: Template
    adapter_policy: Literal["merge", "continue"]
    roles: RolesBlock
    lora: LoraBlock | None
    train: dict[str, Any]
    size: int = Field(default=1000, ge=1)  # N, the fine-tuning rows, poison included
    keep: Literal["pairs", "replies"] = "pairs"
    """What must stay likely: the pairs of the constraint role (the paper), or the aligned model's own refusals of the
    `asked` prompts."""
    openings: int = Field(default=1, ge=1)  # how many cells are certified on the same certify pairs; changes no figure
    align: AlignBlock = Field(default_factory=AlignBlock)
    measure: MeasureBlock = Field(default_factory=MeasureBlock)
    evaluation: EvaluationBlock = Field(default_factory=EvaluationBlock)

    @model_validator(mode="after")
    def _asks_for_what_it_keeps(self) -> Self:
        if self.keep == "replies" and not self.roles.asked:
            raise ValueError("`keep: replies` needs prompts to reply to: set `roles.asked`, or `keep: pairs`")
        return self

    def judge(self) -> str | dict[str, Any]:
        if self.evaluation.judge is None:
            remedy = "train one (holdfast judge train --output judge) and set protocol.evaluation.judge: judge"
            raise ConfigError("the study names no judge", remedy=remedy)
        return self.evaluation.judge

    def record(self, *, judge: Mapping[str, Any], roles: Mapping[str, Any]) -> dict[str, Any]:
        """What is hashed: the settings, with the judge and the data that were used; not how fast replies are made."""
        values = self.model_dump(exclude={"openings": True, "evaluation": {"engine", "batch_size"}})
        if not values["align"]["options"]:
            del values["align"]["options"]  # protocols without any keep the hash they had before there were such
        values["evaluation"]["judge"] = dict(judge)
        return {**values, "data": dict(roles)}


def load_protocol(preset: str, overrides: Mapping[str, Any]) -> Protocol:
    """The protocol of a preset, with blocks of `overrides` put over it key by key."""
    if preset not in PRESETS:
        raise ConfigError(f"protocol: unknown preset {preset!r}", remedy=nearest(preset, sorted(PRESETS)))
    values: dict[str, Any] = {"preset": preset}
    for entry in (*PRESETS[preset], *PROTOCOLS[preset]):
        block, _, name = entry.key.rpartition(".")
        if not block:
            values[name] = entry.value
        elif block not in DEFENSE_BLOCKS:
            values.setdefault(block, {})[name] = entry.value
    values.pop("seed")  # an axis
    values |= {"evaluation": {"judge": "beaver_dam"}} if preset == "paper" else {"keep": "replies"}
    for key, value in overrides.items():
        inner = values.get(key)
        values[key] = {**inner, **value} if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    try:
        return Protocol.model_validate(values)
    except ValidationError as error:
        blocks: dict[str, type[BaseModel]] = {
            "roles": RolesBlock, "lora": LoraBlock, "align": AlignBlock, "measure": MeasureBlock,
            "evaluation": EvaluationBlock,
        }  # fmt: skip
        problems = from_pydantic(error, block_at=lambda place: blocks.get(place[0] if place[1:] else "", Protocol))
        raise_problems(problems, "protocol")
        raise  # unreachable: an invalid block has at least one problem


def paper_constraint() -> dict[str, Any]:
    """`constraint` as the paper has it, for a cell that asks for the paper's version of holdfast."""
    return {e.key.removeprefix("constraint."): e.value for e in PAPER if e.key.startswith("constraint.")}


def align_settings(
    protocol: Protocol, *, model: str, revision: str | None, defense: str, output_dir: Path
) -> dict[str, Any]:
    """The run file of the alignment stage."""
    preset, align = {"preset": "paper"} if protocol.preset == "paper" else {}, protocol.align
    return {
        **_shared(protocol, model, revision, output_dir),
        "task": {"role": "align"},
        "defense": {"name": defense, **preset, **align.options.get(defense, {})},
        "train": {**protocol.train, **align.train, **align.per_defense.get(defense, {})},
        "seed": align.seed,
    }


def finetune_settings(
    protocol: Protocol, cell: Mapping[str, Any], *, model: str, output_dir: Path, kept: Path | None = None
) -> dict[str, Any]:
    """The run file of the fine-tuning stage; after a defense that acts in alignment alone it is plain SFT.

    `cell` has `task`, `poison_ratio`, `seed` and `defense`: its `name`, and optionally `preset`, `options`,
    `constraint` and `train`. `model` is the aligned model, as an adapter on the base; `kept` its own safe replies as
    the safety set, None takes the roles' pairs.
    """
    from holdfast.training.hooks import DEFENSES

    chosen, defense = {"name": "sft"}, cell["defense"]
    preset, constraint = ({"preset": "paper"}, paper_constraint()) if defense.get("preset") == "paper" else ({}, {})
    if DEFENSES[defense["name"]].stages != ("align",):
        chosen = {"name": defense["name"], **preset, **(defense.get("options") or {})}
    safety = {"role": "constraint"} if kept is None else {"data": str(kept), "on_leak": "move"}
    return {
        **_shared(protocol, model, None, output_dir),
        "adapter_policy": protocol.adapter_policy,
        "task": {"name": cell["task"], "size": protocol.size, "poison_ratio": cell["poison_ratio"]},
        "defense": chosen,
        "train": {**protocol.train, **(defense.get("train") or {})},
        "constraint": {**constraint, **(defense.get("constraint") or {})},
        "safety": {**safety, "openings": protocol.openings},
        "seed": cell["seed"],
    }


def _shared(protocol: Protocol, model: str, revision: str | None, output_dir: Path) -> dict[str, Any]:
    settings = protocol.model_dump(include={"dtype", "template", "roles", "lora"})
    return {"model": model, "revision": revision, "output_dir": str(output_dir), **settings}
