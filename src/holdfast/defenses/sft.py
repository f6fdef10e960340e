"""Plain supervised fine-tuning: no defense.

Stage: fine-tuning. Passes per step: one forward and backward. Side data: none; a safety set, where given, is only
watched.
"""

from typing import final

from holdfast.training.hooks import DEFENSES, Defense


@DEFENSES.register("sft")
@final
class SFT(Defense):
    """The task gradient, unchanged."""

    name = "sft"
    packs = True
    stages = ("align", "finetune")
    summary = "plain supervised fine-tuning"
    passes = "1 forward + backward"
    fsdp = deepspeed = True
