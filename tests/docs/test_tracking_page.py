"""The curves that the page on trackers lists are those that a run with two constraints and a behaviour monitor logs."""

from __future__ import annotations

import re
from pathlib import Path

from transformers.integrations.integration_utils import rewrite_logs

from tests.docs.tracking_run import SETS, watched

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "tracking.md").read_text(encoding="utf-8")


def listed() -> set[str]:
    """The names in the first column of the page's tables, with each set's name for NAME."""
    found = re.findall(r"^\| `([^`]+)` \|", PAGE, flags=re.MULTILINE)
    return {name.replace("NAME", one) for name in found for one in SETS}


def test_the_page_lists_what_a_run_logs(tmp_path):
    trainer = watched(tmp_path, asked=4, every=1, alpha=0.2, max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer.train()
    logged = {name for row in trainer.state.log_history for name in rewrite_logs(row)}
    ours = {name for name in logged if name.startswith(("train/safety/", "eval/"))}
    assert "train/safety/answers/g" in ours
    assert listed() == ours | {"train/loss"}
    assert "train/loss" in logged
