"""Every constant of the demonstration: what is trained, on how much, and what is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DemoSettings:
    """Sizes of the demonstration.

    They were set with its own figures in view, the held-out ones too: those show a contrast, and are no estimate of
    what another data set would give (docs/log.md).

    Attributes:
        align_steps, align_rate, align_batch: short alignment on refusals, so that there is a behaviour to keep.
        task_rows, poison_rows: the fine-tuning data, two thirds labelling task, one third poison.
        steps, rate, batch, warmup: fine-tuning, identical for plain SFT and holdfast.
        constraint_rows, heldout_rows: the safety set, split by prompt; the rest stays closed.
        test_rows: task prompts scored by greedy decoding.
    """

    seed: int = 0
    align_steps: int = 18
    align_rate: float = 1e-3
    align_batch: int = 4
    task_rows: int = 128
    poison_rows: int = 64
    steps: int = 40
    rate: float = 8e-4
    batch: int = 4
    safety_batch: int = 4
    warmup: int = 3
    rank: int = 16
    lora_alpha: int = 32
    constraint_rows: int = 120
    heldout_rows: int = 100
    test_rows: int = 200
    refusal_rows: int = 100
    tau: float = 0.1
    alpha: float = 0.05
    max_length: int = 96
