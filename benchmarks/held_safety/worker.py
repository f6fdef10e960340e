"""One worker: trains and evaluates cells, one after the other, as their names come in on standard input.

    python -m benchmarks.held_safety.worker WORK --judge JUDGE

A line `done NAME`, `refused NAME` or `failed NAME` answers each name. `refused`: the command ended before training with
a code that says so (settings, data, infeasible), which is a result. Everything that the work prints goes to
WORK/logs/NAME.log. `schedule.py` starts workers, and starts them again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.held_safety.cells import SHIPPED, Cell, Plan, read_plan

LEFT_OVER = 2 * 2**30
"""Bytes of device memory that a finished cell may leave behind; with more the worker ends, and a fresh one starts."""
REFUSALS = (2, 3, 4)


def record_of(cell: Cell, plan: Plan, work: Path, settings: Any, extra: list[str]) -> dict[str, Any]:
    """Train and evaluate a cell."""
    from benchmarks.held_safety.evaluate import evaluate, free_memory
    from benchmarks.held_safety.train import train

    from holdfast.core.provenance import commit, hardware, versions

    start = time.monotonic()
    model = plan.models[cell.model]
    record: dict[str, Any] = {
        "kind": "cell", "name": cell.name, "model": cell.model, "method": cell.method, "task": cell.task,
        "poison_ratio": cell.ratio, "seed": cell.seed, "part": cell.part, "config": cell.config,
        "model_name": model["name"], "gguf_sha256": model["gguf_sha256"], "training": None, "evaluation": None,
        "provenance": {
            "commit": commit() or os.environ.get("HOLDFAST_COMMIT"), "hardware": hardware(), "versions": versions(),
        },
    }  # fmt: skip
    folder = work / "cells" / cell.name
    if cell.method == SHIPPED:
        files = sorted((work / "data" / cell.part).glob("*.jsonl"))
        tasks = {path.stem: True for path in files if path.stem not in ("harm", "borderline")}
        ref = work / "models" / model["folder"]
    else:
        assert cell.task is not None
        record["training"] = train(cell, plan, work, work / "logs" / f"{cell.name}.log", extra)
        free_memory()
        tasks, ref = {cell.task: (cell.ratio or 0) < 1}, folder / "run" / "adapter"
    if cell.method == SHIPPED or record["training"]["adapter"]:
        record["evaluation"] = evaluate(
            ref, cell.part, tasks, settings, data=work / "data", folder=folder / "evaluation"
        )  # fmt: skip
    record["seconds"] = round(time.monotonic() - start, 1)
    return record


def outcome(record: dict[str, Any]) -> str:
    """What is told to the scheduler."""
    if record["evaluation"] is not None:
        return "done"
    return "refused" if record["training"]["exit_code"] in REFUSALS else "failed"


def work_on(name: str, plan: Plan, work: Path, settings: Any, extra: list[str]) -> str:
    """A cell from its name to its record; an error is logged, and the next cell goes on."""
    from benchmarks.held_safety.evaluate import free_memory
    from benchmarks.held_safety.train import output_to

    from holdfast.core.files import write_json

    try:
        with output_to(work / "logs" / f"{name}.log"):
            try:
                record = record_of(plan.cell(name), plan, work, settings, extra)
            except Exception:
                traceback.print_exc()
                raise
    except Exception:  # noqa: BLE001  (it is in the log)
        return "failed"
    finally:
        free_memory()
    said = outcome(record)
    write_json(work / ("failures" if said == "failed" else "results") / f"{name}.json", record)
    return said


def left_over() -> int:
    """Device memory that is still allocated."""
    import torch

    return int(torch.cuda.memory_allocated()) if torch.cuda.is_available() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and evaluate the cells named on standard input.")
    parser.add_argument("work", type=Path)
    parser.add_argument("--judge", type=Path, required=True, help="Folder of the judge.")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16", help="In which models are evaluated.")
    parser.add_argument("--limit", type=int, help="Only so many rows of each evaluation file, for a trial.")
    parser.add_argument("--memory-share", type=float, help="Of the device's memory that this worker may use, 0 to 1.")
    parser.add_argument("extra", nargs="*", help="key=value of every run file, for a trial.")
    options = parser.parse_intermixed_args()
    import torch
    from benchmarks.held_safety.evaluate import Settings

    if options.memory_share is not None and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(options.memory_share)  # then batches shrink before others fail
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    work, plan = options.work.resolve(), read_plan()
    settings = Settings(options.judge.resolve(), options.batch_size, options.dtype, options.limit)
    settings.opened().judge(["Which day is it?"], ["It is Monday."])  # before any training: without it a cell is lost
    kept = 0
    for line in sys.stdin:
        name = line.strip()
        said = work_on(name, plan, work, settings, options.extra)
        print(said, name, file=answers, flush=True)
        kept = kept or left_over()  # the judge stays in memory from the first cell on
        if left_over() > kept + LEFT_OVER:
            return


if __name__ == "__main__":
    main()
