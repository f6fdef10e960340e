"""Where the time of a step goes: milliseconds of its parts, each with the device's queue empty before and after.

    python -m benchmarks.step_sections --shape llama-3.1-8b --task sst2 --safety-batch 1 \
        --options "answers.unit=kl_first answers.first_k=32 anchor=true metric=adam_unit" --output sections.json

The trainer is that of `holdfast bench --paths run_file`. Waiting for the device around every part makes a step longer
than it is, and a part lies inside of others (`_correct` in `_after_step`), so that figures are compared with each
other and not added up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from transformers import TrainerCallback, TrainerState

from holdfast.constraint.filter import SafetyFilter
from holdfast.constraint.gradients import ParameterSpace
from holdfast.constraint.memory import DualTerm, FilterMemory
from holdfast.core.files import write_json
from holdfast.core.provenance import commit, hardware, versions
from holdfast.training.fused_engine import FusedEngine
from holdfast.training.side_data import SideData
from holdfast.training.steering import Steering
from holdfast.training.trainer import SafeTrainer
from holdfast_lab.bench.paths import Material, build
from holdfast_lab.bench.settings import Settings

PARTS: tuple[tuple[type, str], ...] = (
    (SafeTrainer, "training_step"), (FusedEngine, "accumulate"), (FusedEngine, "measure"), (SideData, "choose"),
    (SideData, "look"), (Steering, "estimate"), (SafetyFilter, "arm"), (FilterMemory, "fold_moment"),
    (FilterMemory, "fold_gradients"), (DualTerm, "add"), (SafetyFilter, "_before_step"),
    (SafetyFilter, "_after_step"), (SafetyFilter, "_correct"), (SafetyFilter, "_diagonal"), (ParameterSpace, "join"),
    (ParameterSpace, "dots"), (ParameterSpace, "theta"), (ParameterSpace, "pull"),
)  # fmt: skip


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def timed(seconds: dict[str, list[float]]) -> Iterator[None]:
    """A context in which every call of a part adds its seconds to the part's list."""

    def around(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def watched(*arguments: Any, **options: Any) -> Any:
            wait()
            start = time.perf_counter()
            found = function(*arguments, **options)
            wait()
            seconds.setdefault(name, []).append(time.perf_counter() - start)
            return found

        return watched

    with ExitStack() as stack:
        for owner, name in PARTS:
            part = around(f"{owner.__name__}.{name}", getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, part))
        yield


class Forget(TrainerCallback):  # type: ignore[misc]
    """Drops what the steps of the warm-up took."""

    def __init__(self, seconds: dict[str, list[float]], warm_up: int) -> None:
        self._seconds, self._warm_up = seconds, warm_up

    def on_step_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        if state.global_step == self._warm_up:
            self._seconds.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--task", default="sst2")
    parser.add_argument("--path", default="run_file")
    parser.add_argument("--safety-batch", type=int, default=4)
    parser.add_argument("--options", default="")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warm-up", type=int, default=16)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    settings = Settings(
        shapes=(given.shape,), paths=(given.path,), steps=given.steps, warm_up=given.warm_up, batch=8,
        safety_batch=given.safety_batch, task=given.task, options=given.options, checkpointing=(False,),
    )  # fmt: skip
    (cell,) = settings.cells(given.shape)
    seconds: dict[str, list[float]] = {}
    with TemporaryDirectory() as folder, timed(seconds):
        trainer = build(cell, Material.of(cell), Path(folder), Path(folder), [Forget(seconds, given.warm_up)])
        trainer.train()
    parts = {}
    for name, each in seconds.items():
        parts[name] = {
            "calls_a_step": round(len(each) / given.steps, 2), "ms_a_step": round(1e3 * sum(each) / given.steps, 3),
            "ms_median": round(1e3 * statistics.median(each), 3),
        }  # fmt: skip
        print(f"{name:32s} {parts[name]['ms_a_step']:9.2f} ms a step, {parts[name]['calls_a_step']:6.2f} calls")
    write_json(given.output, {
        "settings": {key: str(value) for key, value in vars(given).items() if key != "output"}, "parts": parts,
        "provenance": {"commit": commit(), "hardware": hardware(), "versions": versions()},
    })  # fmt: skip


if __name__ == "__main__":
    main()
