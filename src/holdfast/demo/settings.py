"""Every constant of the demonstration: what is trained, on how much, and what is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DemoSettings:
    """Sizes of the demonstration.

    They were set with figures of earlier demos in view, then cut for time with none: what it shows is a contrast, and
    no estimate of what another data set would give (docs/log.md).

    Attributes:
        task_rows, poison_rows: the fine-tuning file, two thirds labelling task, one third poison.
        steps, rate, batch, warmup: fine-tuning, the same for plain SFT and holdfast.
        safety_batch: held examples of each set in a step.
        test_task, test_probes, test_ordinary: held-out prompts asked of every model.
        reply_tokens: of a reply to a probe or an ordinary request.
    """

    seed: int = 0
    task_rows: int = 88
    poison_rows: int = 44
    steps: int = 18
    rate: float = 8e-4
    batch: int = 4
    safety_batch: int = 2
    warmup: int = 3
    rank: int = 16
    lora_alpha: int = 32
    test_task: int = 48
    test_probes: int = 40
    test_ordinary: int = 30
    reply_tokens: int = 12
    max_length: int = 96
