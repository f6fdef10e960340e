"""Two processes whose inputs differ in one point: each stores what it was told."""

from __future__ import annotations

import json
from pathlib import Path

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.core.ranks import barrier, rank, world
from tests import tiny
from tests.distributed.worker import BASE, SAFETY

CASES = ("nothing", "task", "safety", "settings", "limit")


def told(folder: Path, case: str) -> list[str]:
    """The kind of refusal and its words; empty where the trainer was built."""
    other = rank() == 1
    options = {"learning_rate": 0.1} if other and case == "settings" else {}
    tau = 0.2 if other and case == "limit" else 0.1
    try:
        hf.SafeSFTTrainer(
            tiny.model(),
            hf.SafeSFTConfig(
                str(folder / case), reference_cache=str(folder / "cache"), **{**BASE, **SAFETY, **options}
            ),
            processing_class=tiny.tokenizer(), peft_config=tiny.lora(),
            train_dataset=tiny.dataset(16, seed=9 if other and case == "task" else 1, start="w1"),
            safety_dataset=tiny.dataset(20, seed=8 if other and case == "safety" else 2),
            constraint=hf.ChanceConstraint(tau=tau, alpha=0.2, beta=20.0, unit="nll_token"),
        )  # fmt: skip
    except HoldfastError as error:
        return [type(error).__name__, error.what, error.remedy]
    return []


def main(folder: Path) -> None:
    found = {}
    for case in CASES:
        found[case] = told(folder, case)
        barrier()
    assert world() == 2
    (folder / f"told-{rank()}.json").write_text(json.dumps(found))
