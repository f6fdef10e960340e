"""What a run file may say: the shape of every block, with its defaults.

`constraint`, `train` and a defense's options mirror dataclasses elsewhere, against which `load` checks them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_serializer, model_validator

from holdfast.data.templates import Template
from holdfast.defaults import default
from holdfast.records.run_record import NAME, RESERVED, SINGLE
from holdfast.runs.config.blocks import Block, DataBlock, ModelPlace, Number, SafetyBlock, is_single
from holdfast.screening.settings import Rule

DROPS_NOTHING = frozenset({"sft"})
"""Defenses that train on every row unless the file says otherwise: what the others are compared with."""


class TaskBlock(DataBlock):
    """What to learn: a file or hub data set, a task by name, or the protocol's alignment pairs."""

    sources: ClassVar[dict[str, str]] = {"name": "`name` (a task)", "role": "`role: align`"}

    name: str | None = None
    """A task of `holdfast ls tasks`."""
    role: Literal["align"] | None = None
    """`align`: the safe pairs on which the protocol aligns a model before fine-tuning."""
    size: int | None = Field(default=None, ge=1)
    """N, the rows of a named task, poison included; 1,000 unless given."""
    poison_ratio: Number | None = Field(default=None, ge=0, le=1)
    """p: floor(p N) of the rows are harmful pairs; 0 unless given."""

    @model_validator(mode="after")
    def _options_of_a_named_task(self) -> Self:
        if self.name is None and not (self.size is None and self.poison_ratio is None):
            raise ValueError("`size` and `poison_ratio` belong to `name`, which is not given")
        return self


class HarmfulBlock(DataBlock):
    """Harmful pairs, for defenses that train against them: prompts with the replies that must become unlikely."""

    sources: ClassVar[dict[str, str]] = {"role": "`role: harmful`"}

    role: Literal["harmful"] | None = None
    """`harmful`: the protocol's own, instead of `data`."""


class RolesBlock(Block):
    """Who trains on what in the harmful fine-tuning protocol; see `holdfast_lab.protocol.roles.RoleSettings`."""

    safe: Literal["beavertails", "refusals"] = "beavertails"
    """Where safe pairs come from: BeaverTails' own safe answers, or refusals."""
    harm_prompts: Literal["beavertails_test", "beavertails_evaluation"] = "beavertails_test"
    """Where the prompts come from on which harm is measured."""
    align: int = Field(default=5000, ge=1)
    """Safe pairs on which a model is aligned before fine-tuning."""
    constraint: int | None = Field(default=None, ge=1)
    """Safe pairs that steer training; null: the alignment pairs themselves, as in the paper."""
    monitor: int = Field(default=500, ge=0)
    """Safe pairs that are only looked at."""
    certify: int = Field(default=500, ge=0)
    """Safe pairs that stay closed for a certificate."""
    asked: int = Field(default=0, ge=0)
    """Harmful prompts that a study asks the aligned model, to keep its own safe replies to them."""
    harmful: int = Field(default=0, ge=0)
    """Harmful pairs for defenses that train against them."""
    poison: int = Field(default=1000, ge=0)
    """Harmful pairs from which the poison of a named task is taken."""
    evaluation: int = Field(default=700, ge=1)
    """Prompts on which harm is measured."""
    seed: int = Field(default=42, ge=0)
    """Decides which pairs have which role."""


class LoraBlock(Block):
    """A LoRA adapter (PEFT's `LoraConfig`)."""

    r: int = Field(default=default("lora.r"), ge=1)
    """The rank."""
    alpha: Number = Field(default=default("lora.alpha"), gt=0)
    """The adapter is scaled by alpha / r."""
    dropout: Number = Field(default=default("lora.dropout"), ge=0, lt=1)
    """Share of the adapter's inputs that is dropped in a training step."""
    target_modules: str | list[str] = default("lora.target_modules")
    """Names of the layers with an adapter, or `all-linear`."""

    @field_validator("target_modules", mode="before")
    @classmethod
    def _targets(cls, value: Any) -> Any:
        if isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value)):
            return value
        raise ValueError("expected 'all-linear' or a list of module names")


def _conflicts(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, Mapping) and set(value) == {"learn"} and isinstance(value["learn"], str) and value["learn"]:
        return value if info.context is None else {"learn": str((info.context / value["learn"]).resolve())}
    if value in (None, "drop", "keep", "fail"):
        return value
    raise ValueError("expected drop, keep, fail or {learn: FILE}")


def _every(value: Any) -> Any:
    if value in ("end", "epoch") or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError("expected end, epoch or a number of steps of at least 1")


class ScreeningBlock(Block):
    """How the model is asked before training, and how its replies are sorted."""

    max_dropped: Number = Field(default=default("screening.max_dropped"), ge=0, le=1)
    """The largest share of the task's rows that is set aside unless `conflicts` is written."""
    max_prompts: int = Field(default=default("screening.max_prompts"), ge=1)
    """Task prompts that are asked; of a longer file a stratified sample."""
    unsorted: Literal["refuse", "accept"] = "refuse"
    """More than 5 % of the replies cannot be sorted: end the run, or go on without them."""
    engine: str = Field(default="auto", min_length=1)
    """What generates the replies: `auto`, `transformers`, `continuous`, `vllm` or `endpoint`."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Of that engine: `{base_url: http://localhost:8000/v1, model_name: ...}` for an endpoint."""
    judge: ModelPlace | None = None
    """A name of `holdfast ls judges`, or a trained judge's folder: finds more conflicts, settles unsorted replies."""


class MonitorBlock(Block):
    """The behaviour monitor: greedy replies to prompts that nothing steers by."""

    prompts: int = Field(default=default("monitor.prompts"), ge=0)
    """At most this many for each of its figures; 0 watches nothing."""
    every: Annotated[int | Literal["end", "epoch"], BeforeValidator(_every)] = "end"
    """When it asks: after training, after each epoch, or after so many steps, and always at the end."""


class DefenseBlock(Block):
    """A defense by name, with the options of its `Config`."""

    name: str = "holdfast"
    """A name of `holdfast ls defenses`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Fields of its `Config`; they may stand beside the name instead."""


class RunConfig(Block):
    """One fine-tuning run. Build it with `load_config` or `config_from_dict`, which check every block."""

    preset: Literal["paper", "small"] | None = None
    """Values for everything that is not written: `paper` has the paper's, `small` suits a model of 135M parameters."""
    stage: Literal["align", "finetune"] = "finetune"
    """What the run is: training on safe pairs (`align`; the default with `task: {role: align}`), or on the task."""
    model: ModelPlace
    """A hub id, a folder (relative to the run file) with a model or an adapter, or `embedded`."""
    revision: str | None = None
    """Commit, tag or branch of a hub id."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """The type of the weights; `auto`: as stored, but float32 on a CPU that is slow in bfloat16."""
    quantization: Literal["4bit", "8bit"] | None = None
    """Load the base in 4 or 8 bits (bitsandbytes) under an adapter; null: as it is."""
    template: Template = "chat"
    """chat: prompt/completion rows become a user and an assistant turn in the model's own chat template, thinking
    off; alpaca: the same in the Alpaca format; none: they are joined as they are."""
    adapter_policy: Literal["merge", "continue"] = "merge"
    """Where `model` is an adapter: merge it into its base and train a fresh one, or go on training it."""
    roles: RolesBlock | None = None
    """The protocol's roles, for a task by name and for `role:`."""
    task: TaskBlock
    """What to learn."""
    safety: dict[Annotated[str, Field(pattern=NAME)], SafetyBlock]
    """What is held; `auto`, or nothing, is the model's own refusals and answers."""
    conflicts: Annotated[Literal["drop", "keep", "fail"] | dict[str, str] | None, BeforeValidator(_conflicts)] = None
    """Task rows whose prompt the model refuses and whose target complies; null: set aside, up to a limit."""
    screening: ScreeningBlock = Field(default_factory=ScreeningBlock)
    """How the model is asked before training."""
    monitor: MonitorBlock = Field(default_factory=MonitorBlock)
    """How many prompts the behaviour monitor asks, and when."""
    harmful: HarmfulBlock | None = None
    """For defenses that need them; on the protocol's data the role `harmful` unless given."""
    unaligned: ModelPlace | None = None
    """The model before alignment (hub id, folder), for defenses that need it; null: where `model` is an adapter, what
    it was trained on."""
    constraint: dict[str, dict[str, Any]]
    defense: DefenseBlock = Field(default_factory=DefenseBlock)
    lora: LoraBlock | None = Field(default_factory=LoraBlock)
    """The adapter that is trained; null trains every parameter."""
    train: dict[str, Any] = Field(default_factory=dict)
    """Fields of `SafeSFTConfig`, which has all fields of TRL's `SFTConfig`."""
    output_dir: str = Field(min_length=1)
    """The run folder, relative to where the command is called."""
    seed: int = Field(default=default("seed"), ge=0)
    """Of the order of the rows, dropout and a fresh adapter, and of how safety examples are split and drawn."""

    @field_validator("safety", mode="before")
    @classmethod
    def _name_single_safety(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError("expected `auto`, a block with `data`, `role` or `prompts`, or named blocks")
        if taken := sorted(RESERVED & set(value)):
            raise ValueError(f"a safety set cannot be called {taken[0]!r}")
        return {SINGLE: value} if value != {} and is_single(value, SafetyBlock) else value

    @field_validator("defense", mode="before")
    @classmethod
    def _defense_options(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, Mapping) and "options" not in value:
            return {"name": value.get("name", "holdfast"), "options": {k: v for k, v in value.items() if k != "name"}}
        return value

    @model_validator(mode="after")
    def _watched(self) -> Self:
        if not self.safety and self.stage != "align":
            raise ValueError("`safety` is empty; only a run with `stage: align` may go without")
        if self.task.role == "align" and self.stage != "align":
            raise ValueError("`task: {role: align}` is the data of `stage: align`")
        return self

    def skipping_bad_rows(self) -> Self:
        """The same run, with `skip_bad` for every file that it reads."""

        def block(one: Any) -> Any:
            return one if one is None or one.data is None else one.model_copy(update={"skip_bad": True})

        safety = {name: block(one) for name, one in self.safety.items()}
        return self.model_copy(update={"task": block(self.task), "safety": safety, "harmful": block(self.harmful)})

    @model_serializer(mode="wrap")
    def _without_defaults_of_asking(self, dump: Any) -> dict[str, Any]:
        """Settings that were stored before runs asked their model are the same settings, with the same hash."""
        values: dict[str, Any] = dump(self)
        if self.asks:
            return values
        unset = {"conflicts": None, "screening": ScreeningBlock(), "monitor": MonitorBlock()}
        return {key: value for key, value in values.items() if key not in unset or getattr(self, key) != unset[key]}

    @property
    def prompt_sets(self) -> dict[str, SafetyBlock]:
        """The safety sets that are made of the model's own replies."""
        return {name: block for name, block in self.safety.items() if block.prompts is not None}

    @property
    def refusal_prompts(self) -> list[str]:
        """The sources of prompts whose refusals are held."""
        return [source for one in self.prompt_sets.values() if one.keep == "refusals" for source in one.prompts or ()]

    @property
    def asks(self) -> bool:
        """Whether the model is asked before training, for what is to be held."""
        return bool(self.prompt_sets)

    @property
    def conflicts_rule(self) -> tuple[Rule, bool, Path | None]:
        """What becomes of conflicts, whether `screening.max_dropped` limits that, and the file of ids to train on.

        As written, without a limit; else `drop` under the limit, or nothing for plain SFT.
        """
        if isinstance(self.conflicts, dict):
            return "learn", False, Path(self.conflicts["learn"])
        if self.conflicts is not None:
            return self.conflicts, False, None
        return ("keep", False, None) if self.defense.name in DROPS_NOTHING else ("drop", True, None)

    @property
    def named(self) -> bool:
        """Whether the safety sets carry names of the user's own."""
        return list(self.safety) != [SINGLE]


FILE_NAME = "run-file.schema.json"
SHIPPED = Path(__file__).with_name(FILE_NAME)
EDITOR_COMMENT = f"# yaml-language-server: $schema={FILE_NAME}"
"""The line by which editors find the schema that `holdfast init` writes; `python -m tools.run_file_schema` makes it."""


def shipped_schema() -> str:
    """The schema's file, as it is in the package."""
    return SHIPPED.read_text(encoding="utf-8")
