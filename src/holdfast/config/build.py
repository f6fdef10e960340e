"""The objects that a `RunConfig` stands for.

Their classes come with torch, TRL and PEFT, hence the imports inside the functions: a mistake in a run file
is reported before any of those is loaded.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.config.schema import RunConfig
from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.defaults import default

if TYPE_CHECKING:
    from holdfast.certification.kept import Limits
    from holdfast.constraint.chance import ChanceConstraint
    from holdfast.screening.settings import ScreeningSettings


def constraints(config: RunConfig) -> dict[str, ChanceConstraint]:
    """The chance constraint of every safety set."""
    from holdfast.constraint.chance import ChanceConstraint

    return {name: ChanceConstraint(**block) for name, block in config.constraint.items()}


def defense_options(config: RunConfig) -> dict[str, Any]:
    """Every option of the defense, defaults included."""
    return dataclasses.asdict(_defense_config(config))


def defense(config: RunConfig) -> Any:
    """The defense with its options."""
    from holdfast.trainers.hooks import DEFENSES

    cls: Any = DEFENSES[config.defense.name]
    return cls(_defense_config(config))


def _defense_config(config: RunConfig) -> Any:
    from holdfast.trainers.hooks import DEFENSES

    return DEFENSES[config.defense.name].Config(**config.defense.options, **config.filter)


def data_arguments(config: RunConfig) -> dict[str, Any]:
    """Which data the run reads, as keyword arguments of `holdfast.stages.prepare.prepare`.

    Safety sets with `prompts` are left out: the model is asked for them.
    """
    return {
        "task": config.task.model_dump(),
        "safety": {name: block.model_dump() for name, block in config.safety.items() if name not in config.prompt_sets},
        "template": config.template,
        "seed": config.seed,
        "roles": None if config.roles is None else config.roles.model_dump(),
        "harmful": harmful_block(config),
    }


def watches(config: RunConfig) -> bool:
    """Whether the model is asked before training: to build sets, to find conflicts, or to be watched afterwards.

    Runs on the protocol's roles are measured by their study.
    """
    written = any(block.data is not None for block in config.safety.values())
    return config.asks or (written and (bool(config.monitor.prompts) or config.conflicts is not None))


def screening_settings(config: RunConfig) -> ScreeningSettings:
    """What is asked and held, and what becomes of conflicts.

    A run that holds pairs of the user's own keeps every row unless `conflicts` is written.
    """
    from holdfast.screening.conflicts import read_ids
    from holdfast.screening.settings import PromptSet, ScreeningSettings

    rule, limited, learn = config.conflicts_rule
    if not config.asks and config.conflicts is None:
        rule = "keep"
    sets = {name: PromptSet(tuple(b.prompts or ()), b.keep or "refusals") for name, b in config.prompt_sets.items()}
    return ScreeningSettings(
        sets=sets, rule=rule, limited=limited, learn=frozenset() if learn is None else read_ids(learn),
        max_dropped=config.screening.max_dropped, max_prompts=config.screening.max_prompts,
        accept_unsorted=config.screening.unsorted == "accept", judge=config.screening.judge,
        monitor_prompts=config.monitor.prompts,
        seed=config.seed,
    )  # fmt: skip


def behaviour_limits(config: RunConfig) -> Limits:
    """The shares of kept behaviour that may be lost: of refusals the constraint's alpha."""
    from holdfast.certification.kept import Limits

    kept = [name for name, block in config.prompt_sets.items() if block.keep == "refusals"]
    alphas = [constraints(config)[name].alpha for name in (kept or config.safety)]
    return Limits(refusals=max(alphas))


def harmful_block(config: RunConfig) -> dict[str, Any] | None:
    """Where the harmful pairs come from; None for a defense that needs none in this stage."""
    from holdfast.trainers.hooks import DEFENSES

    if "harmful" not in DEFENSES[config.defense.name].needed(config.stage):
        return None
    return {"role": "harmful"} if config.harmful is None else config.harmful.model_dump()


def model_options(config: RunConfig, trust_remote_code: bool) -> dict[str, Any]:
    """How the model is loaded, as keyword arguments of `load_pair`."""
    return {
        "dtype": config.dtype,
        "revision": config.revision,
        "quantization": config.quantization,
        "trust_remote_code": trust_remote_code,
    }


def peft_config(config: RunConfig) -> Any:
    """PEFT's `LoraConfig`, or None for training every parameter."""
    if config.lora is None:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=config.lora.r,
        lora_alpha=config.lora.alpha,
        lora_dropout=config.lora.dropout,
        target_modules=config.lora.target_modules,
        task_type="CAUSAL_LM",
        revision=config.revision,  # of the base: an adapter that does not name it is read on another commit later
    )


def training_arguments(config: RunConfig, *, elsewhere: bool = False) -> Any:
    """The `SafeSFTConfig` of the run; what TRL refuses is a `ConfigError` under `train`.

    Args:
        config: the run. Where it leaves `train.bf16` open, bf16 is used on GPUs that have it: TRL would use it
            everywhere, and fail on a machine without GPU.
        elsewhere: the run is only looked at here, so this machine need not have what it asks for.
    """
    from transformers.utils import is_torch_bf16_gpu_available

    from holdfast.trainers.config import SafeSFTConfig

    train = dict(config.train)
    if train.get("bf16") is None:
        train["bf16"] = not train.get("fp16", False) and is_torch_bf16_gpu_available()
    if elsewhere:
        train["use_cpu"] = True
    folder = Path(config.output_dir)
    first = next(iter(config.safety.values()), None)
    shares: dict[str, Any] = {} if first is None else {"safety_fractions": first.fractions, "on_leak": first.on_leak}
    try:
        arguments = SafeSFTConfig(
            **train,
            output_dir=str(folder / "checkpoints"),
            run_dir=str(folder),
            stage=config.stage,
            seed=config.seed,
            safety_seed=config.seed,
            **shares,
        )
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
