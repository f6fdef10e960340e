"""DeepSpeed settings that the filter was run with; all others are refused by name, before a model is loaded."""

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.core.ranks import launched_with

STAGES = (1, 2)
TESTED = frozenset(
    """zero_optimization train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
    bf16 fp16 steps_per_print wall_clock_breakdown zero_allow_untested_optimizer""".split()  # noqa: SIM905
)
TESTED_OF_ZERO = frozenset(
    """stage offload_optimizer offload_param allgather_partitions allgather_bucket_size overlap_comm reduce_scatter
    reduce_bucket_size contiguous_gradients round_robin_gradients""".split()  # noqa: SIM905
)
INSTEAD = (
    "use FSDP2, which shards weights too: `accelerate launch --config_file fsdp2.yaml` with distributed_type: FSDP and "
    "fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP} (examples/launch/fsdp2.yaml); or "
    "ZeRO-2 (examples/launch/zero2.yaml)"
)
OWN = "leave it out: the run's own optim, learning_rate, lr_scheduler_type and warmup_steps are used"


def settings(args: Any) -> Mapping[str, Any] | None:
    """DeepSpeed's settings, of the arguments or of `accelerate launch`; None where it is not used."""
    given = args.deepspeed
    if not given and not launched_with("DEEPSPEED"):
        return None
    given = given or os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if given == "none":  # accelerate's own questions, answered one by one
        name = "ACCELERATE_DEEPSPEED_"
        offload = {
            key: {"device": os.environ.get(f"{name}{key.upper()}_DEVICE", "none")}
            for key in ("offload_optimizer", "offload_param")
        }
        return {"zero_optimization": {"stage": int(os.environ.get(f"{name}ZERO_STAGE", "2")), **offload}}
    if isinstance(given, Mapping):
        return given
    try:
        read: dict[str, Any] = json.loads(Path(given).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"DeepSpeed's settings {given}: {error}", remedy="give the path of a JSON file, or a mapping"
        ) from error
    return read


def _problems(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is not supported, each with its remedy."""
    zero = config.get("zero_optimization", {})
    stage = int(zero.get("stage", 0))
    if stage == 3:
        yield "DeepSpeed ZeRO-3: its weights are in parts that the safety pass would have to gather", INSTEAD
    elif stage not in STAGES:
        remedy = "set zero_optimization: {stage: 2}, or use DDP (examples/launch/ddp.yaml)"
        yield f"DeepSpeed stage {stage}: its optimizer has no parts for the filter to correct", remedy
    for key in ("offload_optimizer", "offload_param"):
        device = (zero.get(key) or {}).get("device", "none")
        if device != "none":
            what = f"DeepSpeed {key} to {device}: its step runs elsewhere than the filter's correction"
            yield what, f"set {key}: {{device: none}}"
    if isinstance(fp16 := config.get("fp16"), Mapping) and fp16.get("enabled") is True:
        yield "fp16 in DeepSpeed's settings: gradients carry a loss scale, and an overflow voids the step", "use bf16"
    for key in ("optimizer", "scheduler"):
        if key in config:
            yield f"{key} in DeepSpeed's settings: its step is not a torch optimizer's with hooks", OWN
    other = sorted({*config} - TESTED - {"optimizer", "scheduler"})
    other += sorted(key for key in {*zero} - TESTED_OF_ZERO if not key.startswith("stage3_"))
    if other:
        yield f"DeepSpeed settings never run with the filter: {', '.join(other)}", "leave them out"


def require_supported_settings(args: Any) -> None:
    """Refuse settings of DeepSpeed, in the arguments or by `accelerate launch`, that the filter was not run with."""
    config = settings(args)
    if config is None:
        return
    require_supported_config(config)
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError("DeepSpeed is not installed", remedy="pip install deepspeed, or use DDP or FSDP2")


def require_supported_config(config: Mapping[str, Any]) -> None:
    """Refuse the first of DeepSpeed's settings that is not supported."""
    for what, remedy in _problems(config):
        raise UnsupportedError(what, remedy=remedy)


def require_supported_run(trainer: Any) -> None:
    """Refuse what the arguments alone do not give away."""
    inner = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    checkpointing = trainer.args.gradient_checkpointing_kwargs or {}
    for condition, what, remedy in (
        (
            trainer.args.gradient_checkpointing and checkpointing.get("use_reentrant"),
            "re-entrant gradient checkpointing under DeepSpeed: the safety pass differentiates without `.backward()`",
            "set gradient_checkpointing_kwargs: {use_reentrant: false}",
        ),
        (
            getattr(inner, "is_quantized", False),
            "a quantised base under DeepSpeed: never run with the filter",
            "use DDP (examples/launch/ddp.yaml) or FSDP2 (examples/launch/fsdp2.yaml)",
        ),
        (
            trainer.method != "SFT",
            f"{trainer.method} under DeepSpeed: never run with the filter",
            "use DDP (examples/launch/ddp.yaml)",
        ),
    ):
        if condition:
            raise UnsupportedError(what, remedy=remedy)
