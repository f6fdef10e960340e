"""`SafeDPOTrainer`: TRL's `DPOTrainer` under the same constraints as `SafeSFTTrainer`.

theta_0 is the model that is given, DPO's reference the one that TRL takes: the same, unless `ref_model` says otherwise.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from trl import DPOConfig, DPOTrainer

from holdfast.core.library_types import LanguageModel
from holdfast.training.config import SafetyArguments
from holdfast.training.preference import PreferenceTrainer


@dataclass
class SafeDPOConfig(SafetyArguments, DPOConfig):
    """Arguments of `SafeDPOTrainer`; every field of `trl.DPOConfig` is accepted too."""


class SafeDPOTrainer(PreferenceTrainer, DPOTrainer):
    """Drop-in for `trl.DPOTrainer`: pass `safety_dataset`, `constraint` and, if not holdfast, `defense`."""

    _tag_names: ClassVar[list[str]] = ["trl", "dpo", "holdfast"]
    arguments = SafeDPOConfig

    def __init__(
        self,
        model: str | LanguageModel | None,
        ref_model: str | LanguageModel | None = None,
        args: DPOConfig | None = None,
        **kwargs: Any,
    ) -> None:
        """Arguments of `DPOTrainer` (by keyword, after these three), and those of `SafeSFTTrainer`."""
        super().__init__(model, args, ref_model=ref_model, **kwargs)
