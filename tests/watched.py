"""Runs whose behaviour is watched, on the hand-built model that refuses prompts with one word in them.

The model of `narrow` refuses "secret tonight ..." by a wide margin and other "secret ..." by a small one. Its task
teaches it to answer the latter. A constraint on the former holds, their refusals stay, and all others are lost: pairs
of a foreign source protect prompts like their own and nothing else.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig

import holdfast as hf
from holdfast.data.examples import Example, make_example
from holdfast.screening.sets import MonitorPrompts
from tests import behaving

WIDE = 3.0  # margin of the refusals that are held
TARGETS = ["v_proj", "o_proj"]
COMMON = {
    "max_steps": 12, "per_device_train_batch_size": 8, "learning_rate": 2e-2, "lr_scheduler_type": "constant",
    "bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no", "max_length": 32,
    "disable_tqdm": True, "gradient_checkpointing": False, "safety_batch_size": 8, "logging_steps": 1, "seed": 7,
    "safety_micro_batch_size": 64,
}  # fmt: skip


def asked(rows: list[dict[str, str]], *kinds: str) -> tuple[Example, ...]:
    """Prompts alone; of these kinds in turn, where any are given."""
    of = cycle(kinds or (None,))
    return tuple(make_example(row["prompt"], "", f"row {i}", next(of)) for i, row in enumerate(rows))


def held() -> list[dict[str, str]]:
    return behaving.rows(100, seed=1, weak=100)


def task(reply: str = behaving.ANSWER) -> list[dict[str, str]]:
    return [{"prompt": row["prompt"], "completion": reply} for row in behaving.rows(60, seed=3)]


def prompts(n: int = 60) -> MonitorPrompts:
    return MonitorPrompts(
        refusals=asked(behaving.rows(n, seed=5, weak=n)),
        unseen=asked(behaving.rows(n, seed=2), "privacy", "weapons"),
        answers=asked(behaving.rows(n, seed=6, trigger=False)),
    )


def build(folder: Path, *, given: dict[str, Any] | None = None, dropout: float = 0.0, **options: Any) -> Any:
    """A trainer of the narrow run; `given` replaces its arguments, `options` are fields of `SafeSFTConfig`."""
    lora = LoraConfig(r=4, lora_alpha=4, lora_dropout=dropout, target_modules=TARGETS, task_type="CAUSAL_LM")
    arguments = hf.SafeSFTConfig(str(folder / "run"), **{**COMMON, **options})
    return hf.SafeSFTTrainer(
        **{
            "model": behaving.model(weak=WIDE),
            "args": arguments,
            "processing_class": behaving.tokenizer(),
            "train_dataset": Dataset.from_list(task()),
            "safety_dataset": Dataset.from_list(held()),
            "constraint": hf.ChanceConstraint(unit="kl_token"),
            "peft_config": lora,
            **(given or {}),
        }
    )
