"""Training on preferences or rewards: what it does not support is refused by name, before anything is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.core.errors import CheckpointError, UnsupportedError
from holdfast.core.library_types import LanguageModel
from holdfast.training.hooks import Defense, make_defense
from holdfast.training.trainer import SafeTrainer

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainingArguments

    from holdfast.training.config import SafetyArguments

TASK_HOOKS = ("choose_batch", "task_loss", "extra_loss")


class PreferenceTrainer(SafeTrainer):
    """A trainer whose task's gradient is not that of labelled rows; measuring and correcting do not depend on it."""

    def __init__(self, model: str | LanguageModel | None, args: TrainingArguments | None, **kwargs: Any) -> None:
        args = self.arguments.of(args)
        _require_supported_task(args, kwargs)
        super().__init__(model, args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        require_resumable(self)
        super()._load_from_checkpoint(resume_from_checkpoint, model)


def _require_supported_task(args: SafetyArguments, given: dict[str, Any]) -> None:
    """Make the defense of a trainer's arguments; refuse one that changes the task, alignment and images."""
    if args.stage != "finetune":
        raise UnsupportedError(
            f"stage {args.stage!r} with preferences or rewards: alignment here is training on safe pairs",
            remedy="use SafeSFTTrainer to align, and leave stage out",
        )
    columns = getattr(given.get("train_dataset"), "column_names", None) or ()
    if {"image", "images"} & set(columns):
        raise UnsupportedError("vision data sets", remedy="use a text data set")
    defense = given["defense"] = make_defense(given.get("defense", "holdfast"))
    own = [name for name in TASK_HOOKS if getattr(type(defense), name) is not getattr(Defense, name)]
    if own or not defense.packed("finetune"):
        raise UnsupportedError(
            f"defense {defense.name!r} with preferences or rewards: it changes how rows with labels are trained on",
            remedy="use holdfast, sft, or another defense that leaves the task's batch and loss alone",
        )


def require_resumable(trainer: SafeTrainer) -> None:
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
