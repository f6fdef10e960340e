"""What a `RunConfig` stands for: objects of torch, TRL and PEFT, and the settings with nothing left implicit."""

import dataclasses
from pathlib import Path
from typing import Any, cast

from peft import LoraConfig
from transformers.utils import is_torch_bf16_gpu_available

from holdfast.certification.kept import Limits
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.core.hashing import plain
from holdfast.core.redaction import redact
from holdfast.defaults import block as table_block
from holdfast.defaults import constraint_defaults, default
from holdfast.records.run_record import settings_sha256
from holdfast.runs.config.load import OWNED
from holdfast.runs.config.schema import RunConfig
from holdfast.screening.conflicts import read_ids
from holdfast.screening.settings import PromptSet, ScreeningSettings
from holdfast.training.config import SafeSFTConfig
from holdfast.training.hooks import DEFENSES, Defense


@dataclasses.dataclass(frozen=True)
class ResolvedRun:
    config: RunConfig
    constraints: dict[str, ChanceConstraint]  # by safety set
    defense: Defense
    arguments: SafeSFTConfig  # of the trainer
    values: dict[str, Any]  # every setting, defaults included, as `config.yaml` stores them
    screening: ScreeningSettings | None  # how the model is asked before training; None where it is not

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def sha256(self) -> str:
        """Hash of everything that can change the result: the settings without `output_dir`."""
        return settings_sha256(self.values)

    @property
    def behaviour_limits(self) -> Limits:
        """The shares of kept behaviour that may be lost: of refusals the constraint's alpha."""
        kept = [name for name, block in self.config.prompt_sets.items() if block.keep == "refusals"]
        return Limits(refusals=max(self.constraints[name].alpha for name in (kept or self.config.safety)))

    @property
    def needs(self) -> frozenset[str]:
        """The side data that the defense uses in this stage."""
        return self.defense.needed(self.config.stage)


def resolve(config: RunConfig, *, elsewhere: bool = False) -> ResolvedRun:
    """Resolve a run; `elsewhere` where it is only looked at here, so this machine need not have what it asks for."""
    return ResolvedRun(
        config, constraints(config), defense(config), training_arguments(config, elsewhere=elsewhere),
        resolved(config), screening_settings(config),
    )  # fmt: skip


def constraints(config: RunConfig) -> dict[str, ChanceConstraint]:
    """The chance constraint of every safety set."""
    base = constraint_defaults()
    return {name: ChanceConstraint(**{**base, **block}) for name, block in config.constraint.items()}


def defense(config: RunConfig) -> Defense:
    """The defense with its options; those of `holdfast` are in the table."""
    cls: Any = DEFENSES[config.defense.name]
    base = table_block("defense") if config.defense.name == "holdfast" else {}
    return cast("Defense", cls(cls.Config(**{**base, **config.defense.options})))


def data_arguments(config: RunConfig) -> dict[str, Any]:
    """Which data the run reads, as keyword arguments of `holdfast.runs.stages.prepare.prepare`.

    Safety sets with `prompts` are left out: the model is asked for them. Harmful pairs are read where they are needed.
    """
    harmful = {"role": "harmful"} if config.harmful is None else config.harmful.model_dump()
    return {
        "task": config.task.model_dump(),
        "safety": {name: block.model_dump() for name, block in config.safety.items() if name not in config.prompt_sets},
        "template": config.template, "seed": config.seed,
        "roles": None if config.roles is None else config.roles.model_dump(),
        "harmful": harmful if "harmful" in DEFENSES[config.defense.name].needed(config.stage) else None,
    }  # fmt: skip


def screening_settings(config: RunConfig) -> ScreeningSettings | None:
    """What is asked and held, and what becomes of conflicts; None where the model is not asked.

    It is asked to build sets, to find conflicts, or to be watched afterwards. Runs on the protocol's roles are measured
    by their study. A run that holds pairs of the user's own keeps every row unless `conflicts` is written.
    """
    pairs = any(block.data is not None for block in config.safety.values())
    if not config.asks and not (pairs and (config.monitor.prompts or config.conflicts is not None)):
        return None
    rule, limited, learn = config.conflicts_rule
    if not config.asks and config.conflicts is None:
        rule = "keep"
    blocks = config.prompt_sets.items()
    sets = {name: PromptSet(tuple(b.prompts or ()), b.keep or "refusals", b.limit) for name, b in blocks}
    return ScreeningSettings(
        sets=sets, rule=rule, limited=limited, learn=frozenset() if learn is None else read_ids(learn),
        max_dropped=config.screening.max_dropped, max_prompts=config.screening.max_prompts,
        accept_unsorted=config.screening.unsorted == "accept", judge=config.screening.judge,
        monitor_prompts=config.monitor.prompts, seed=config.seed,
    )  # fmt: skip


def peft_config(config: RunConfig) -> LoraConfig | None:
    """PEFT's `LoraConfig`, or None for training every parameter."""
    if config.lora is None:
        return None
    # With the base's revision: an adapter that does not name it is read on another commit later.
    return LoraConfig(
        r=config.lora.r, lora_alpha=config.lora.alpha, lora_dropout=config.lora.dropout,
        target_modules=config.lora.target_modules, task_type="CAUSAL_LM", revision=config.revision,
    )  # fmt: skip


def training_arguments(config: RunConfig, *, elsewhere: bool = False) -> SafeSFTConfig:
    """The `SafeSFTConfig` of the run; what TRL refuses is a `ConfigError` under `train`.

    bf16, where left open, is used on GPUs that have it: TRL would use it everywhere, and fail on a machine without GPU.
    """
    train = dict(config.train)
    if train.get("bf16") is None:
        train["bf16"] = not train.get("fp16", False) and is_torch_bf16_gpu_available()
    if elsewhere:
        train["use_cpu"] = True
    folder, first = Path(config.output_dir), next(iter(config.safety.values()), None)
    shares: dict[str, Any] = {} if first is None else {"safety_fractions": first.fractions, "on_leak": first.on_leak}
    try:
        arguments = SafeSFTConfig(
            **train, output_dir=str(folder / "checkpoints"), run_dir=str(folder), stage=config.stage, seed=config.seed,
            safety_seed=config.seed, **shares,
        )  # fmt: skip
    except HoldfastError:
        raise
    except (ValueError, TypeError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"train: {reason}", remedy="change the fields it names under `train`") from error
    rows = arguments.safety_batch_size
    if rows is not None and rows == default("train.safety_batch_size"):
        # A default must not fail on eight processes: there every process takes one row.
        arguments.safety_batch_size = rows + -rows % arguments.world_size
    return arguments


def resolved(config: RunConfig) -> dict[str, Any]:
    """Every setting of the run, defaults included, as plain JSON values in the shape of a run file; secrets blanked."""
    values = config.model_dump()
    values["train"] = {k: v for k, v in defaults(SafeSFTConfig).items() if k not in OWNED} | config.train
    base = defaults(ChanceConstraint) | constraint_defaults()
    blocks = {name: base | block for name, block in config.constraint.items()}
    values["constraint"] = blocks if config.named else next(iter(blocks.values()))
    if not config.named:
        values["safety"] = next(iter(values["safety"].values()))
    values["defense"] = {"name": config.defense.name, **dataclasses.asdict(defense(config).config)}
    return cast("dict[str, Any]", redact(plain(values)))


def defaults(cls: Any) -> dict[str, Any]:
    """The declared default of every field of a dataclass that has one."""
    fields, missing = dataclasses.fields(cls), dataclasses.MISSING
    made = {field.name: field.default_factory() for field in fields if field.default_factory is not missing}
    return made | {field.name: field.default for field in fields if field.default is not missing}
