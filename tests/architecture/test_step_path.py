"""From `training_step` to the corrected weights: the files on the way to each gradient and to the correction.

A file is on the way where it is on the call stack when the task's gradient is computed, when a constraint's is, when
the constraint is estimated, or when the weights are corrected. What these call in passing (tensor algebra, scoring,
reading the batch) is not.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.constraint.filter import SafetyFilter
from holdfast.training.steering import Steering
from tests.unit.trainers.building import TIGHT, deep

SOURCE = Path(holdfast.__file__).parents[1]


def files_on_the_stack() -> set[str]:
    found, frame = set(), sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE):
            found.add(str(path.relative_to(SOURCE)))
        frame = frame.f_back  # type: ignore[assignment]
    return found


def test_at_most_nine_files(tmp_path, monkeypatch):
    seen: dict[str, set[str]] = {}

    def watch(owner: Any, name: str, label: str) -> None:
        inner = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if trainer.is_in_train:
                seen.setdefault(label, set()).update(files_on_the_stack())
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    trainer = deep(tmp_path, given={"constraint": TIGHT}, max_steps=2)
    watch(torch.Tensor, "backward", "gradients")
    watch(Steering, "estimate", "estimate")
    watch(SafetyFilter, "_correct", "correction")
    trainer.train()
    assert set(seen) == {"gradients", "estimate", "correction"}
    on_the_way = set.union(*seen.values())
    assert "holdfast/training/side_pass.py" in on_the_way  # the constraint's gradient was seen, not the task's alone
    assert len(on_the_way) <= 9, sorted(on_the_way)
