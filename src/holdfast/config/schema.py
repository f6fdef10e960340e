"""What a run file may say: the shape of every block, with its defaults.

The blocks `constraint`, `filter`, `train` and the options of a defense mirror dataclasses elsewhere
(`ChanceConstraint`, `Holdfast.Config`, `SafeSFTConfig`, a defense's `Config`); they are kept as mappings here
and checked against those classes by `holdfast.config.load`, so that each field is documented in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_serializer, model_validator

from holdfast.data.templates import Template
from holdfast.records.run_record import NAME, RESERVED, SINGLE


def number(value: Any) -> Any:
    """Read `1e-4` as a number: YAML 1.1 wants a dot in it and hands over text otherwise."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


Number = Annotated[float, BeforeValidator(number)]


class Block(BaseModel):
    """Base of all blocks: unknown keys, NaN and conversions are refused; values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class DataBlock(Block):
    """Where examples come from."""

    data: str | None = Field(default=None, min_length=1)
    """A .jsonl, .json, .csv, .tsv or .parquet file, relative to the run file, or a hub data set."""
    columns: dict[str, str] | None = None
    """Our names (prompt, completion, messages, text) to the file's columns."""
    split: str | None = None
    subset: str | None = None
    revision: str | None = None
    limit: int | None = Field(default=None, ge=1)
    """Read only the first rows."""
    skip_bad: Literal[True] | None = None
    """Leave out malformed rows, as long as they are few, and count them; null refuses them."""

    @model_serializer(mode="wrap")
    def _without_default(self, dump: Any) -> dict[str, Any]:
        """Settings that were stored before `skip_bad` was known are the same settings, with the same hash."""
        return {key: value for key, value in dump(self).items() if key != "skip_bad" or value is not None}

    def only_with_data(self) -> None:
        """Refuse options of a file where there is none."""
        for name in ("columns", "split", "subset", "revision", "limit", "skip_bad"):
            if self.data is None and getattr(self, name) is not None:
                raise ValueError(f"`{name}` belongs to `data`, which is not given")


class TaskBlock(DataBlock):
    """What to learn: a file or hub data set, a task by name, or the protocol's alignment pairs."""

    name: str | None = None
    """A task of `holdfast ls tasks`."""
    role: Literal["align"] | None = None
    """`align`: the safe pairs on which the protocol aligns a model before fine-tuning."""
    size: int | None = Field(default=None, ge=1)
    """N, the rows of a named task, poison included; 1,000 unless given."""
    poison_ratio: Number | None = Field(default=None, ge=0, le=1)
    """p: floor(p N) of the rows are harmful pairs; 0 unless given."""

    @model_validator(mode="after")
    def _one_source(self) -> TaskBlock:
        if sum(value is not None for value in (self.data, self.name, self.role)) != 1:
            raise ValueError("expected one of `data` (a file or hub data set), `name` (a task) and `role: align`")
        self.only_with_data()
        if self.name is None and not (self.size is None and self.poison_ratio is None):
            raise ValueError("`size` and `poison_ratio` belong to `name`, which is not given")
        return self


class SafetyBlock(DataBlock):
    """Safety examples: prompts with the reply that must stay likely."""

    role: Literal["constraint"] | None = None
    """`constraint`: the protocol's constraint, monitor and certify pairs, instead of `data`."""
    fractions: Annotated[tuple[Number, Number, Number], Field(strict=False)] = (0.6, 0.2, 0.2)
    """Shares for steering (constraint), watching (monitor) and certifying; they add up to 1."""
    on_leak: Literal["error", "move"] = "error"
    """A certify prompt that also occurs in the task data: refuse, or move it to the constraint share."""
    openings: int = Field(default=1, ge=1)
    """How often the certify share may be opened; each opening gets an equal part of the allowed error."""

    @field_validator("fractions")
    @classmethod
    def _fractions(cls, value: tuple[float, float, float]) -> tuple[float, float, float]:
        if min(value) < 0 or value[0] == 0 or abs(sum(value) - 1) > 1e-6:
            raise ValueError("expected three shares that add up to 1, the first above 0")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> SafetyBlock:
        if (self.data is None) == (self.role is None):
            raise ValueError("expected one of `data` (a file or hub data set) and `role: constraint`")
        self.only_with_data()
        return self

    @property
    def source(self) -> str:
        """Where the examples come from, for records."""
        return self.data if self.data is not None else f"role {self.role}"


class HarmfulBlock(DataBlock):
    """Harmful pairs, for defenses that train against them: prompts with the replies that must become unlikely."""

    role: Literal["harmful"] | None = None
    """`harmful`: the protocol's own, instead of `data`."""

    @model_validator(mode="after")
    def _one_source(self) -> HarmfulBlock:
        if (self.data is None) == (self.role is None):
            raise ValueError("expected one of `data` (a file or hub data set) and `role: harmful`")
        self.only_with_data()
        return self


class RolesBlock(Block):
    """Who trains on what in the harmful fine-tuning protocol; see `holdfast.protocol.roles.RoleSettings`."""

    safe: Literal["beavertails", "refusals"] = "beavertails"
    """Where safe pairs come from: BeaverTails' own safe answers, or refusals."""
    harm_prompts: Literal["beavertails_test", "beavertails_evaluation"] = "beavertails_test"
    """Where the prompts come from on which harm is measured."""
    align: int = Field(default=5000, ge=1)
    constraint: int | None = Field(default=None, ge=1)
    """null: the alignment pairs themselves, as in the paper."""
    monitor: int = Field(default=500, ge=0)
    certify: int = Field(default=500, ge=0)
    asked: int = Field(default=0, ge=0)
    """Harmful prompts that a study asks the aligned model, to keep its own safe replies to them."""
    harmful: int = Field(default=0, ge=0)
    """Harmful pairs for defenses that train against them."""
    poison: int = Field(default=1000, ge=0)
    evaluation: int = Field(default=700, ge=1)
    seed: int = Field(default=42, ge=0)


class LoraBlock(Block):
    """A LoRA adapter (PEFT's `LoraConfig`)."""

    r: int = Field(default=16, ge=1)
    alpha: Number = Field(default=32, gt=0)
    dropout: Number = Field(default=0.0, ge=0, lt=1)
    target_modules: str | list[str] = "all-linear"

    @field_validator("target_modules", mode="before")
    @classmethod
    def _targets(cls, value: Any) -> Any:
        if isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value)):
            return value
        raise ValueError("expected 'all-linear' or a list of module names")


class DefenseBlock(Block):
    """A defense by name, with the options of its `Config`."""

    name: str = "holdfast"
    options: dict[str, Any] = Field(default_factory=dict)


class RunConfig(Block):
    """One fine-tuning run. Build it with `load_config` or `config_from_dict`, which check every block."""

    preset: Literal["paper", "small"] | None = None
    stage: Literal["align", "finetune"] = "finetune"
    """What the run is: training on safe pairs (`align`; the default with `task: {role: align}`), or on the task."""
    model: str = Field(min_length=1)
    """Hub id, local folder (relative to the run file), adapter, or `embedded`."""
    revision: str | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    quantization: Literal["4bit", "8bit"] | None = None
    template: Template = "chat"
    """chat: prompt/completion rows become a user and an assistant turn in the model's own chat template, thinking
    off; alpaca: the same in the Alpaca format; none: they are joined as they are."""
    adapter_policy: Literal["merge", "continue"] = "merge"
    """Where `model` is an adapter: merge it into its base and train a fresh one, or go on training it."""
    roles: RolesBlock | None = None
    """The protocol's roles, for a task by name and for `role:`."""
    task: TaskBlock
    safety: dict[Annotated[str, Field(pattern=NAME)], SafetyBlock]
    harmful: HarmfulBlock | None = None
    """For defenses that need them; on the protocol's data the role `harmful` unless given."""
    unaligned: str | None = Field(default=None, min_length=1)
    """The model before alignment (hub id, folder), for defenses that need it; null: where `model` is an adapter, what
    it was trained on."""
    constraint: dict[str, dict[str, Any]]
    filter: dict[str, Any] = Field(default_factory=dict)
    defense: DefenseBlock = Field(default_factory=DefenseBlock)
    lora: LoraBlock | None = Field(default_factory=LoraBlock)
    """null trains every parameter."""
    train: dict[str, Any] = Field(default_factory=dict)
    """Fields of `SafeSFTConfig`, which has all fields of TRL's `SFTConfig`."""
    output_dir: str = Field(min_length=1)
    seed: int = Field(default=42, ge=0)

    @field_validator("safety", mode="before")
    @classmethod
    def _name_single_safety(cls, value: Any) -> Any:
        return {SINGLE: value} if value != {} and is_single(value, SafetyBlock) else value

    @field_validator("safety")
    @classmethod
    def _no_reserved_name(cls, value: dict[str, SafetyBlock]) -> dict[str, SafetyBlock]:
        if taken := sorted(RESERVED & set(value)):
            raise ValueError(f"a safety set cannot be called {taken[0]!r}")
        return value

    @field_validator("constraint", mode="before")
    @classmethod
    def _name_single_constraint(cls, value: Any) -> Any:
        return {SINGLE: value} if value != {} and is_single(value) else value

    @field_validator("defense", mode="before")
    @classmethod
    def _defense_options(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, Mapping) and "options" not in value:
            return {
                "name": value.get("name", "holdfast"),
                "options": {k: v for k, v in value.items() if k != "name"},
            }
        return value

    @model_validator(mode="after")
    def _watched(self) -> RunConfig:
        if not self.safety and self.stage != "align":
            raise ValueError("`safety` is empty; only a run with `stage: align` may go without")
        if self.task.role == "align" and self.stage != "align":
            raise ValueError("`task: {role: align}` is the data of `stage: align`")
        return self

    def skipping_bad_rows(self) -> RunConfig:
        """The same run, with `skip_bad` for every file that it reads."""

        def block(one: Any) -> Any:
            return one if one is None or one.data is None else one.model_copy(update={"skip_bad": True})

        safety = {name: block(one) for name, one in self.safety.items()}
        return self.model_copy(update={"task": block(self.task), "safety": safety, "harmful": block(self.harmful)})

    @property
    def named(self) -> bool:
        """Whether the safety sets carry names of the user's own."""
        return list(self.safety) != [SINGLE]


def is_single(value: Any, block: type[BaseModel] | None = None) -> bool:
    """Whether a `safety` or `constraint` value is one block rather than a mapping of names to blocks."""
    if not isinstance(value, Mapping) or not value:
        return isinstance(value, Mapping)
    if block is not None and any(key in block.model_fields for key in value):
        return True
    return not all(isinstance(item, Mapping) for item in value.values())
