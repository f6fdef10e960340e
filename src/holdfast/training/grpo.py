"""`SafeGRPOTrainer`: TRL's `GRPOTrainer` under the same constraints as `SafeSFTTrainer`.

The task's gradient is that of GRPO's loss on replies that the model samples, from the weights that the filter left; the
constraints are measured on the safety set's own replies, as ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from transformers import TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from holdfast.core.errors import UnsupportedError
from holdfast.core.library_types import LanguageModel
from holdfast.core.ranks import rank
from holdfast.training.config import SafetyArguments, setting
from holdfast.training.preference import PreferenceTrainer
from holdfast.training.state_files import load_state, save_state

if TYPE_CHECKING:
    from torch import Tensor

GENERATION = ("_step", "entropy_coef", "_last_world_entropy")  # where TRL's trainer is between two generations
REPLIES = "_buffered_inputs"
OTHER_GENERATION = {
    "use_vllm": "never run with the filter; it merges an adapter into its base and out again, which moves theta_0",
    "use_transformers_continuous_batching": "it casts the weights to bfloat16, in which corrections are lost",
}


@dataclass
class SafeGRPOConfig(SafetyArguments, GRPOConfig):
    """Arguments of `SafeGRPOTrainer`; every field of `trl.GRPOConfig` is accepted too."""

    max_length: int | None = setting(1024, "Tokens of a safety example, prompt and reply; longer ones are cut.")

    @classmethod
    def from_trl(cls, args: TrainingArguments, **changes: object) -> Self:
        """As of the other trainers; TRL fills in `generation_batch_size`, and refuses it where it is given."""
        return super().from_trl(args, generation_batch_size=None, **changes)


class SafeGRPOTrainer(PreferenceTrainer, GRPOTrainer):
    """Drop-in for `trl.GRPOTrainer`: pass `safety_dataset`, `constraint` and, if not holdfast, `defense`."""

    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "holdfast"]
    arguments = SafeGRPOConfig

    def __init__(
        self,
        model: str | LanguageModel | None,
        reward_funcs: object = None,
        args: GRPOConfig | None = None,
        **kwargs: Any,
    ) -> None:
        """Arguments of `GRPOTrainer` (by keyword, after these three), and those of `SafeSFTTrainer`."""
        for name, why in OTHER_GENERATION.items():
            if getattr(args, name, False):
                raise UnsupportedError(f"{name}: {why}", remedy=f"set {name}=False: the model in training generates")
        super().__init__(model, args, reward_funcs=reward_funcs, **kwargs)
        if self.is_fsdp_enabled:
            raise UnsupportedError(
                "rewards under FSDP2: sampling replies from a sharded model was never run with the filter",
                remedy="use DDP (accelerate launch without FSDP), with LoRA or QLoRA where memory is short",
            )

    def _write_state(self, folder: Path) -> dict[str, Tensor]:
        """As of the other trainers, with the replies that later steps still train on."""
        state = {name: getattr(self, name) for name in GENERATION}
        used_up = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        save_state(folder / f"generation-{rank()}", {**state, REPLIES: None if used_up else self._buffered_inputs})
        return super()._write_state(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            state = load_state(Path(checkpoint) / f"generation-{rank()}")
            for name in (*GENERATION, REPLIES):
                setattr(self, name, self._prepare_input(state[name]))
