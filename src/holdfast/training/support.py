"""Combinations in which the guarantee would not be computed correctly: refused by name, before anything is trained."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from holdfast.constraint.gradients import ParameterSpace
from holdfast.core.errors import UnsupportedError
from holdfast.core.ranks import launched_with
from holdfast.scoring.completion import deterministic, require_understood_head
from holdfast.training import zero_support
from holdfast.training.row_weights import require_row_weights

logger = logging.getLogger(__name__)

LAYERWISE_OPTIMIZERS = ("lomo", "adalomo", "layerwise")
SECOND_ITERATE_OPTIMIZERS = ("schedule_free",)
FSDP1 = (
    "FSDP version 1: flat parameters do not allow two consecutive backward passes",
    "set fsdp_version: 2 in the accelerate configuration, or fsdp_config={'version': 2}",
)


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


def _refuse(condition: bool, what: str, remedy: str) -> None:
    if condition:
        raise UnsupportedError(what, remedy=remedy)


def optimizer_name(args: Any) -> str:
    """`optim` as one writes it; the arguments hold an enumeration, whose own text is `OptimizerNames.ADAMW_TORCH`."""
    return str(getattr(args.optim, "value", args.optim))


def require_import_order(cls: type) -> None:
    """Refuse Unsloth where it was imported after the trainers here.

    It puts classes of its own in the place of TRL's, under the same names. A trainer whose base was imported before is
    still TRL's, while the model, the arguments and `Trainer.training_step` are Unsloth's.
    """
    if "unsloth" in sys.modules and (trl := sys.modules.get("trl")) is not None:
        now = [getattr(trl, name, None) for name in ("SFTTrainer", "DPOTrainer", "GRPOTrainer")]
        _refuse(
            not any(one in cls.__mro__ for one in now),
            f"unsloth was imported after holdfast: {cls.__name__} stands on TRL's trainer, not on Unsloth's",
            "write `import unsloth` as the first import of the program, before holdfast, trl and transformers",
        )


def require_whole_model(args: Any, asks: str, remedy: str) -> None:
    """Refuse what asks the model itself under FSDP. The arguments' distributed state still says DDP there."""
    sharded = launched_with("FSDP") or bool(args.fsdp)
    _refuse(sharded, f"{asks} under FSDP: a sharded model cannot be asked", remedy)


def require_supported_arguments(args: Any) -> None:
    """Refuse what the arguments alone give away."""
    optim = optimizer_name(args)
    _refuse(
        bool(args.fp16),
        "fp16 training: gradients carry the loss scale, and an overflow voids the step the filter corrects",
        "use bf16=True",
    )
    zero_support.require_supported_settings(args)
    _refuse((args.fsdp_plugin_args or {}).get("fsdp_version", 2) == 1, *FSDP1)
    _refuse(
        args.n_gpu > 1,
        "nn.DataParallel (several GPUs visible to one process)",
        "launch with `accelerate launch` or `torchrun`, or set CUDA_VISIBLE_DEVICES to one GPU",
    )
    _refuse(
        any(name in optim for name in LAYERWISE_OPTIMIZERS),
        f"optimizer {optim}: it updates parameters during the backward pass, before the filter can see the step",
        "use adamw_torch or another optimizer with an ordinary step",
    )
    _refuse(
        any(name in optim for name in SECOND_ITERATE_OPTIMIZERS),
        f"optimizer {optim}: it keeps a second set of weights, and the next step would undo the correction",
        "use adamw_torch with a learning-rate schedule",
    )
    _refuse(
        bool(args.torch_compile),
        "torch_compile: the safety pass has other shapes than the task pass and reads hidden states through a hook",
        "set torch_compile=False",
    )
    _refuse(
        bool(args.auto_find_batch_size),
        "auto_find_batch_size: it restarts the loop with another batch, and with it another constraint estimate",
        "set per_device_train_batch_size yourself; safety_micro_batch_size splits the safety pass",
    )


def require_device(args: Any) -> None:
    """Refuse settings that this machine's device cannot follow; `check` does not ask, it may run elsewhere."""
    _refuse(
        bool(getattr(args, "activation_offloading", False)) and args.device.type == "cpu",
        "activation_offloading without a GPU: there is nothing to move activations away from",
        "set activation_offloading: false, or train on a GPU",
    )


def require_supported_engine(accelerator: Any, *, adapter: bool = False) -> None:
    """Refuse engines known only once accelerate is set up; `adapter`: whether a PEFT adapter is trained."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type)).upper()
    if "DEEPSPEED" in kind:
        plugin = getattr(accelerator, "deepspeed_plugin", None)
        zero_support.require_supported_config(getattr(plugin, "deepspeed_config", {}))
    _refuse("MEGATRON" in kind or "XLA" in kind, f"the {kind} engine", "use DDP or FSDP2 (accelerate launch)")
    _refuse("FSDP" in kind and not getattr(accelerator, "is_fsdp2", False), *FSDP1)
    sharding = getattr(getattr(accelerator, "state", None), "fsdp_plugin", None)
    _refuse(
        adapter and bool(getattr(sharding, "activation_checkpointing", False)),
        "FSDP's activation_checkpointing with an adapter: PEFT does not find the wrapped layers and saves no weight",
        "set activation_checkpointing: false and gradient_checkpointing=True",
    )
    parallel = getattr(accelerator, "parallelism_config", None)
    for name, words in (("tp", "tensor"), ("cp", "context"), ("sp", "sequence")):
        size = getattr(parallel, f"{name}_size", 1) or 1
        _refuse(size > 1, f"{words} parallelism ({name}_size={size})", "use data parallelism: DDP or FSDP2")
    replicas = getattr(parallel, "dp_replicate_size", 1) or 1
    _refuse(
        "FSDP" in kind and replicas > 1, f"hybrid sharding (dp_replicate_size={replicas})", "use one-dimensional FSDP2"
    )


def require_supported_model(model: Any, *, vision: bool) -> None:
    """Refuse models and adapters whose losses or steps we cannot compute."""
    _refuse(vision, "vision data sets", "use a text data set")
    _refuse(
        bool(getattr(model, "is_distributed_loading_by_transformers", False)),
        "a model sharded while it was loaded (DistributedConfig): hooks we do not control reduce its gradients",
        "load it whole and let accelerate shard it (FSDP2)",
    )
    for config in getattr(model, "peft_config", {}).values():
        _refuse(
            bool(config.is_prompt_learning),
            f"{config.peft_type}: virtual tokens shift every position of the sequence",
            "use LoRA",
        )


def require_float32(model: Any) -> None:
    """Refuse trainable weights below float32, in which the sum of two gradients' steps is mostly rounding."""
    ParameterSpace([p for p in model.parameters() if p.requires_grad])


def keep_adapters_in_float32(model: Any) -> None:
    """Cast trainable adapters of a quantised base back to float32.

    TRL stores them in bfloat16 there, in which `theta_after - theta_before` is mostly rounding. A full-precision base
    is left alone: its trainable weights in bfloat16 are refused when the filter is attached.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not (getattr(model, "is_quantized", False) or getattr(inner, "is_quantized", False)):
        return
    cast = [p for p in model.parameters() if p.requires_grad and p.dtype == torch.bfloat16]
    for p in cast:
        p.data = p.data.float()
    if cast:
        logger.info("adapters of the quantised base are kept in float32: bfloat16 cannot hold the filter's corrections")


def require_shardable(model: Any) -> None:
    """Refuse weights that FSDP2 cannot shard."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    _refuse(
        bool(getattr(inner, "is_loaded_in_8bit", False)),
        "an 8-bit base under FSDP2, which shards floating-point numbers alone",
        "use quantization: 4bit, whose bits are stored as bfloat16, or DDP",
    )


def require_supported_defense(trainer: Any) -> None:
    """Refuse weights of the task loss, harmful pairs' heads and sharding that the defense does not know."""
    run, defense = trainer.run, trainer.defense
    require_row_weights(trainer)
    if run.data.harmful:  # an alignment run has no safety set with which this is looked at
        with deterministic(trainer.model), run.forward.precision():
            require_understood_head(trainer.model, run.forward.batch(run.data.harmful[:1]))
    if trainer.is_fsdp_enabled:
        require_shardable(trainer.model)
    if trainer.is_deepspeed_enabled:
        zero_support.require_supported_run(trainer)
    for engine, used, known in (
        ("FSDP2", trainer.is_fsdp_enabled, defense.fsdp),
        ("DeepSpeed", trainer.is_deepspeed_enabled, defense.deepspeed),
    ):
        if used and not known:
            raise UnsupportedError(
                f"defense {defense.name!r} under {engine}: its algebra on parts of the weights is not implemented",
                remedy="use DDP (accelerate launch --multi_gpu); `holdfast ls defenses --json` lists what supports it",
            )
