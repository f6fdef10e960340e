"""What training on preferences or rewards does not support: refused by name, before anything is trained."""

from collections.abc import Mapping
from typing import Any

from holdfast.core.errors import CheckpointError, UnsupportedError
from holdfast.training.hooks import Defense, make_defense

OTHER_GENERATION = {
    "use_vllm": "it merges the adapter into the base and takes it out again, which moves theta_0 by rounding",
    "use_transformers_continuous_batching": "it casts the weights to bfloat16, in which corrections are lost",
}
TASK_HOOKS = ("choose_batch", "task_loss", "extra_loss")


def require_supported_task(args: Any, given: dict[str, Any]) -> None:
    """Make the defense of a trainer's arguments; refuse one that changes the batch or the loss, and alignment."""
    if args.stage != "finetune":
        raise UnsupportedError(
            f"stage {args.stage!r} with preferences or rewards: alignment here is training on safe pairs",
            remedy="use SafeSFTTrainer to align, and leave stage out",
        )
    defense = given["defense"] = make_defense(given.get("defense", "holdfast"))
    own = [name for name in TASK_HOOKS if getattr(type(defense), name) is not getattr(Defense, name)]
    if own or not defense.packed("finetune"):
        raise UnsupportedError(
            f"defense {defense.name!r} with preferences or rewards: it changes how rows with labels are trained on",
            remedy="use holdfast, sft, or another defense that leaves the task's batch and loss alone",
        )


def require_own_generation(args: Any, given: Mapping[str, Any]) -> None:
    """Refuse replies that the model in training does not sample by itself, and images."""
    for name, why in OTHER_GENERATION.items():
        if getattr(args, name, False):
            raise UnsupportedError(f"{name}: {why}", remedy=f"set {name}=False: the model in training generates")
    columns = getattr(given.get("train_dataset"), "column_names", None) or ()
    if {"image", "images"} & set(columns):
        raise UnsupportedError("vision data sets", remedy="use a text data set")


def require_whole_model(trainer: Any) -> None:
    """Refuse shards, from which the model in training would have to sample."""
    if trainer.is_fsdp_enabled:
        raise UnsupportedError(
            "rewards under FSDP2: sampling replies from a sharded model was never run with the filter",
            remedy="use DDP (accelerate launch without FSDP), with LoRA or QLoRA where memory is short",
        )


def require_resumable(trainer: Any) -> None:
    """Refuse to resume a run of which no checkpoint has everything."""
    missing = {
        "sync_ref_model": ("the reference model that training has moved", trainer.args.sync_ref_model),
        "rollout_func": ("the state of your function", getattr(trainer, "rollout_func", None)),
        "environment_factory": ("the state of your environments", getattr(trainer, "environment_factories", None)),
    }
    for name, (what, present) in missing.items():
        if present:
            raise CheckpointError(
                f"a run with {name} cannot be resumed: no checkpoint has {what}",
                remedy="start again without resume_from_checkpoint, in a new output_dir",
            )
