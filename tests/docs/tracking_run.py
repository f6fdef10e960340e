"""The two runs in the picture of docs/guides/tracking.md, reported to trackio: `python -m tests.docs.tracking_run`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset

import holdfast as hf
from tests import behaving
from tests.watched import build, held, prompts

SETS = ("refusals", "answers")


def watched(folder: Path, *, asked: int, every: int, alpha: float = 0.05, defense: str = "holdfast", **options: Any):
    """A trainer that holds refusals and answers, and asks `asked` prompts for each figure `every` so many steps."""
    answers = behaving.rows(60, seed=8, trigger=False)
    given = {
        "safety_dataset": {"refusals": Dataset.from_list(held()), "answers": Dataset.from_list(answers)},
        "constraint": dict.fromkeys(SETS, hf.ChanceConstraint(unit="kl_token", alpha=alpha)),
        "defense": defense,
    }
    trainer = build(folder, given=given, **options)
    trainer.watch_behaviour(prompts(asked), every=every)
    return trainer


def main() -> None:
    """Plain SFT and holdfast, 24 steps each."""
    for name, defense in (("holdfast", "holdfast"), ("plain SFT", "sft")):
        with tempfile.TemporaryDirectory() as folder:
            report = {"report_to": "trackio", "project": "tiny", "run_name": name}
            watched(
                Path(folder), asked=40, every=2, defense=defense, max_steps=24, learning_rate=6e-3, **report
            ).train()


if __name__ == "__main__":
    main()
