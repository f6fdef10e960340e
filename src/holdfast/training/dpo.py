"""`SafeDPOTrainer`: TRL's `DPOTrainer` under the same constraints as `SafeSFTTrainer`.

The task's gradient is that of DPO's loss on pairs of replies; measuring the constraints and correcting the step do not
depend on it. theta_0 is the model that is given, DPO's reference the one that TRL takes: the same, unless `ref_model`
says otherwise.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from trl import DPOConfig, DPOTrainer

from holdfast.training.config import SafetyArguments
from holdfast.training.preference import require_resumable, require_supported_task
from holdfast.training.trainer import SafeTrainer


@dataclass
class SafeDPOConfig(SafetyArguments, DPOConfig):
    """Arguments of `SafeDPOTrainer`; every field of `trl.DPOConfig` is accepted too."""


class SafeDPOTrainer(SafeTrainer, DPOTrainer):
    """Drop-in for `trl.DPOTrainer`: pass `safety_dataset`, `constraint` and, if not holdfast, `defense`."""

    _tag_names: ClassVar[list[str]] = ["trl", "dpo", "holdfast"]
    arguments = SafeDPOConfig

    def __init__(self, model: Any, ref_model: Any = None, args: DPOConfig | None = None, **kwargs: Any) -> None:
        """Arguments of `DPOTrainer` (by keyword, after these three), and those of `SafeSFTTrainer`."""
        args = self.arguments.of(args)
        require_supported_task(args, kwargs)
        super().__init__(model, args, ref_model=ref_model, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        require_resumable(self)
        super()._load_from_checkpoint(resume_from_checkpoint, model)
