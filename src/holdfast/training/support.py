"""Combinations in which the guarantee would not be computed correctly: refused by name, before anything is trained."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from holdfast.constraint.gradients import ParameterSpace
from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.core.library_types import LanguageModel
from holdfast.core.ranks import launched_with
from holdfast.scoring.completion import deterministic, require_understood_head
from holdfast.training.row_weights import require_row_weights

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import TrainingArguments

    from holdfast.training.trainer import SafeTrainer

logger = logging.getLogger(__name__)

LAYERWISE_OPTIMIZERS = ("lomo", "adalomo", "layerwise")
FSDP1 = (
    "FSDP version 1: flat parameters do not allow two consecutive backward passes",
    "set fsdp_version: 2 in the accelerate configuration, or fsdp_config={'version': 2}",
)
ZERO_STAGES = (1, 2)
ZERO_SETTINGS = frozenset(  # with which the filter was run
    """zero_optimization train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
    bf16 fp16 steps_per_print wall_clock_breakdown zero_allow_untested_optimizer optimizer scheduler
    """.split()  # noqa: SIM905
)
ZERO_OPTIMIZATION = frozenset(
    """stage offload_optimizer offload_param allgather_partitions allgather_bucket_size overlap_comm reduce_scatter
    reduce_bucket_size contiguous_gradients round_robin_gradients""".split()  # noqa: SIM905
)
INSTEAD = (
    "use FSDP2, which shards weights too: `accelerate launch --config_file fsdp2.yaml` with distributed_type: FSDP and "
    "fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP} (examples/launch/fsdp2.yaml); or "
    "ZeRO-2 (examples/launch/zero2.yaml)"
)
OWN = "leave it out: the run's own optim, learning_rate, lr_scheduler_type and warmup_steps are used"


@contextmanager
def cudnn_attention(enabled: bool) -> Iterator[None]:
    """Attention with cuDNN's kernels or, as training has it, by the others.

    The backward of cuDNN's, which torch 2.11 to 2.13 take for masked batches on Hopper GPUs, gives NaN where the padded
    length is 64 modulo 128 and a row's scores are far below zero, as Qwen2.5's are (pytorch/pytorch#196678).
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _refuse(*cases: tuple[object, str, str]) -> None:
    """Refuse the first case whose condition holds; the others are what is refused and the remedy."""
    for condition, what, remedy in cases:
        if condition:
            raise UnsupportedError(what, remedy=remedy)


def _innermost(model: LanguageModel) -> LanguageModel:
    """The model below an adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def optimizer_name(args: TrainingArguments) -> str:
    """`optim` as one writes it; the arguments hold an enumeration, whose own text is `OptimizerNames.ADAMW_TORCH`."""
    return str(getattr(args.optim, "value", args.optim))


def require_import_order(cls: type) -> None:
    """Refuse Unsloth where it was imported after the trainers here.

    It puts classes of its own in the place of TRL's, under the same names. A trainer whose base was imported before is
    still TRL's, while the model, the arguments and `Trainer.training_step` are Unsloth's.
    """
    if "unsloth" in sys.modules and (trl := sys.modules.get("trl")) is not None:
        now = [getattr(trl, name, None) for name in ("SFTTrainer", "DPOTrainer", "GRPOTrainer")]
        what = f"unsloth was imported after holdfast: {cls.__name__} stands on TRL's trainer, not on Unsloth's"
        remedy = "write `import unsloth` as the first import of the program, before holdfast, trl and transformers"
        _refuse((not any(one in cls.__mro__ for one in now), what, remedy))


def require_whole_model(args: TrainingArguments, asks: str, remedy: str) -> None:
    """Refuse what asks the model itself under FSDP. The arguments' distributed state still says DDP there."""
    sharded = launched_with("FSDP") or args.fsdp
    _refuse((sharded, f"{asks} under FSDP: a sharded model cannot be asked", remedy))


def require_supported_arguments(args: TrainingArguments) -> None:
    """Refuse what the arguments alone give away."""
    _refuse((
        args.fp16, "fp16 training: gradients carry the loss scale, and an overflow voids the step the filter corrects",
        "use bf16=True",
    ))  # fmt: skip
    require_supported_zero(args)
    optim = optimizer_name(args)
    _refuse(
        ((args.fsdp_plugin_args or {}).get("fsdp_version", 2) == 1, *FSDP1),
        (args.n_gpu > 1, "nn.DataParallel (several GPUs visible to one process)",
         "launch with `accelerate launch` or `torchrun`, or set CUDA_VISIBLE_DEVICES to one GPU"),
        (any(name in optim for name in LAYERWISE_OPTIMIZERS),
         f"optimizer {optim}: it updates parameters during the backward pass, before the filter can see the step",
         "use adamw_torch or another optimizer with an ordinary step"),
        ("schedule_free" in optim,
         f"optimizer {optim}: it keeps a second set of weights, and the next step would undo the correction",
         "use adamw_torch with a learning-rate schedule"),
        (args.torch_compile,
         "torch_compile: the safety pass has other shapes than the task pass and reads hidden states through a hook",
         "set torch_compile=False"),
        (args.auto_find_batch_size,
         "auto_find_batch_size: it restarts the loop with another batch, and with it another constraint estimate",
         "set per_device_train_batch_size yourself; safety_micro_batch_size splits the safety pass"),
    )  # fmt: skip


def require_device(args: TrainingArguments) -> None:
    """Refuse settings that this machine's device cannot follow; `check` does not ask, it may run elsewhere."""
    what = "activation_offloading without a GPU: there is nothing to move activations away from"
    offloads = getattr(args, "activation_offloading", False) and args.device.type == "cpu"
    _refuse((offloads, what, "set activation_offloading: false, or train on a GPU"))


def require_supported_engine(accelerator: Accelerator, *, adapter: bool = False) -> None:
    """Refuse engines known only once accelerate is set up; `adapter`: whether a PEFT adapter is trained."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type)).upper()
    if "DEEPSPEED" in kind:
        plugin = getattr(accelerator, "deepspeed_plugin", None)
        _refuse(*_of_zero(getattr(plugin, "deepspeed_config", {})))
    sharding = getattr(getattr(accelerator, "state", None), "fsdp_plugin", None)
    parallel = getattr(accelerator, "parallelism_config", None)

    def size(axis: str) -> int:
        return int(getattr(parallel, f"{axis}_size", 1) or 1)

    replicas = size("dp_replicate")
    _refuse(
        ("MEGATRON" in kind or "XLA" in kind, f"the {kind} engine", "use DDP or FSDP2 (accelerate launch)"),
        ("FSDP" in kind and not getattr(accelerator, "is_fsdp2", False), *FSDP1),
        (adapter and getattr(sharding, "activation_checkpointing", False),
         "FSDP's activation_checkpointing with an adapter: PEFT does not find the wrapped layers and saves no weight",
         "set activation_checkpointing: false and gradient_checkpointing=True"),
        *((size(axis) > 1, f"{words} parallelism ({axis}_size={size(axis)})", "use data parallelism: DDP or FSDP2")
          for axis, words in (("tp", "tensor"), ("cp", "context"), ("sp", "sequence"))),
        ("FSDP" in kind and replicas > 1, f"hybrid sharding (dp_replicate_size={replicas})",
         "use one-dimensional FSDP2"),
    )  # fmt: skip


def require_supported_model(model: LanguageModel, *, vision: bool) -> None:
    """Refuse models and adapters whose losses or steps we cannot compute."""
    _refuse(
        (vision, "vision data sets", "use a text data set"),
        (getattr(model, "is_distributed_loading_by_transformers", False),
         "a model sharded while it was loaded (DistributedConfig): hooks we do not control reduce its gradients",
         "load it whole and let accelerate shard it (FSDP2)"),
        *((c.is_prompt_learning, f"{c.peft_type}: virtual tokens shift every position of the sequence", "use LoRA")
          for c in getattr(model, "peft_config", {}).values()),
    )  # fmt: skip


def require_float32(model: LanguageModel) -> None:
    """Refuse trainable weights below float32, in which the sum of two gradients' steps is mostly rounding."""
    ParameterSpace([p for p in model.parameters() if p.requires_grad])


def keep_adapters_in_float32(model: LanguageModel) -> None:
    """Cast trainable adapters of a quantised base back to float32.

    TRL stores them in bfloat16 there, in which `theta_after - theta_before` is mostly rounding. A full-precision base
    is left alone: its trainable weights in bfloat16 are refused when the filter is attached.
    """
    if not any(getattr(one, "is_quantized", False) for one in (model, _innermost(model))):
        return
    cast = [p for p in model.parameters() if p.requires_grad and p.dtype == torch.bfloat16]
    for p in cast:
        p.data = p.data.float()
    if cast:
        logger.info("adapters of the quantised base are kept in float32: bfloat16 cannot hold the filter's corrections")


def require_shardable(model: LanguageModel) -> None:
    """Refuse weights that FSDP2 cannot shard."""
    what = "an 8-bit base under FSDP2, which shards floating-point numbers alone"
    remedy = "use quantization: 4bit, whose bits are stored as bfloat16, or DDP"
    _refuse((getattr(_innermost(model), "is_loaded_in_8bit", False), what, remedy))


def require_supported_defense(trainer: SafeTrainer) -> None:
    """Refuse weights of the task loss, harmful pairs' heads and sharding that the defense does not know."""
    run, defense = trainer.run, trainer.defense
    require_row_weights(trainer)
    if run.data.harmful:  # an alignment run has no safety set with which this is looked at
        with deterministic(trainer.model), run.forward.precision():
            require_understood_head(trainer.model, run.forward.batch(run.data.harmful[:1]))
    if trainer.is_fsdp_enabled:
        require_shardable(trainer.model)
    if trainer.is_deepspeed_enabled:
        require_supported_zero_run(trainer)
    what = f"defense {defense.name!r} under {{}}: its algebra on parts of the weights is not implemented"
    remedy = "use DDP (accelerate launch --multi_gpu); `holdfast ls defenses --json` lists what supports it"
    _refuse(
        (trainer.is_fsdp_enabled and not defense.fsdp, what.format("FSDP2"), remedy),
        (trainer.is_deepspeed_enabled and not defense.deepspeed, what.format("DeepSpeed"), remedy),
        (trainer.is_deepspeed_enabled and bool(getattr(defense.config, "verify", 0)),
         "verify under DeepSpeed: its model has a step's weights only after the step", "set verify: 0, or use DDP"),
    )  # fmt: skip


def zero_settings(args: TrainingArguments) -> Mapping[str, Any] | None:
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


def _of_zero(config: Mapping[str, Any]) -> Iterator[tuple[object, str, str]]:
    """What of DeepSpeed's settings is not supported: all that the filter was not run with."""
    zero = config.get("zero_optimization", {})
    stage = int(zero.get("stage", 0))
    yield stage == 3, "DeepSpeed ZeRO-3: its weights are in parts that the safety pass would have to gather", INSTEAD
    yield (
        stage not in ZERO_STAGES,
        f"DeepSpeed stage {stage}: its optimizer has no parts for the filter to correct",
        "set zero_optimization: {stage: 2}, or use DDP (examples/launch/ddp.yaml)",
    )
    for key in ("offload_optimizer", "offload_param"):
        device = (zero.get(key) or {}).get("device", "none")
        what = f"DeepSpeed {key} to {device}: its step runs elsewhere than the filter's correction"
        yield device != "none", what, f"set {key}: {{device: none}}"
    fp16 = config.get("fp16")
    yield (
        isinstance(fp16, Mapping) and fp16.get("enabled") is True,
        "fp16 in DeepSpeed's settings: gradients carry a loss scale, and an overflow voids the step",
        "use bf16",
    )
    for key in ("optimizer", "scheduler"):
        yield key in config, f"{key} in DeepSpeed's settings: its step is not a torch optimizer's with hooks", OWN
    other = sorted({*config} - ZERO_SETTINGS)
    other += sorted(key for key in {*zero} - ZERO_OPTIMIZATION if not key.startswith("stage3_"))
    yield other, f"DeepSpeed settings never run with the filter: {', '.join(other)}", "leave them out"


def require_supported_zero(args: TrainingArguments) -> None:
    """Refuse settings of DeepSpeed, in the arguments or by `accelerate launch`, that the filter was not run with."""
    config = zero_settings(args)
    if config is None:
        return
    _refuse(*_of_zero(config))
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError("DeepSpeed is not installed", remedy="pip install deepspeed, or use DDP or FSDP2")


def require_supported_zero_run(trainer: SafeTrainer) -> None:
    """Refuse what the arguments alone do not give away."""
    checkpointing = trainer.args.gradient_checkpointing_kwargs or {}
    _refuse(
        (trainer.args.gradient_checkpointing and checkpointing.get("use_reentrant"),
         "re-entrant gradient checkpointing under DeepSpeed: the safety pass differentiates without `.backward()`",
         "set gradient_checkpointing_kwargs: {use_reentrant: false}"),
        (getattr(_innermost(trainer.model), "is_quantized", False),
         "a quantised base under DeepSpeed: never run with the filter",
         "use DDP (examples/launch/ddp.yaml) or FSDP2 (examples/launch/fsdp2.yaml)"),
        (trainer.method != "SFT", f"{trainer.method} under DeepSpeed: never run with the filter",
         "use DDP (examples/launch/ddp.yaml)"),
    )  # fmt: skip
