"""Peak memory and time of `check`, `screen` and `train` on a task file of many rows.

    python -m benchmarks.many_rows [--rows 1000000] [--output benchmarks/results/many_rows.json]

The model is the hand-built one of the tests (one layer; it refuses prompts with one word in them), so that what grows
is what the rows need and not what a model does. A row has some 400 bytes; two in a hundred ask for what is refused.
`train` takes two steps. Peak: the largest resident memory of the command's process, as the kernel counts it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests import behaving

from holdfast.core.files import write_json
from holdfast.core.provenance import commit, hardware, versions

WORDS, REFUSED = 55, 0.02
RUN = """\
model: {model}
task: {{data: task.jsonl}}
output_dir: run
conflicts: drop
train: {{max_steps: 2, per_device_train_batch_size: 8, gradient_checkpointing: false}}
"""


def write_rows(path: Path, rows: int, seed: int = 0) -> None:
    """Distinct prompts of random words, each with the answer that the model gives to the others."""
    draw = random.Random(seed)  # noqa: S311  (no secret)
    with path.open("w", encoding="utf-8") as handle:
        for number in range(rows):
            words = [f"{draw.randrange(50_000):x}" for _ in range(WORDS)]
            words[0] = behaving.TRIGGER if draw.random() < REFUSED else behaving.WORDS[number % len(behaving.WORDS)]
            handle.write(json.dumps({"prompt": " ".join(words), "completion": behaving.ANSWER}) + "\n")


def measured(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run `holdfast ARGUMENTS`: seconds, exit code and peak memory; what it prints goes to a file beside it."""
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        out = os.open("output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.execv(sys.executable, [sys.executable, "-m", "holdfast", *arguments])  # noqa: S606
    _, status, usage = os.wait4(pid, 0)
    return {
        "command": " ".join(arguments), "exit_code": os.waitstatus_to_exitcode(status),
        "seconds": round(time.monotonic() - start, 1), "peak_gb": round(usage.ru_maxrss * 1024 / 1e9, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and time of a task file of many rows.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--output", type=Path, help="The record; printed alone unless given.")
    parser.add_argument("--keep", type=Path, help="Work in this folder and leave it.")
    options = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["HOLDFAST_CACHE"] = str(folder / "cache")
        model = behaving.saved(folder / "model")
        write_rows(folder / "task.jsonl", options.rows)
        (folder / "run.yaml").write_text(RUN.format(model=model.name), encoding="utf-8")
        record: dict[str, Any] = {
            "rows": options.rows, "bytes": (folder / "task.jsonl").stat().st_size, "commands": [],
            "provenance": {"commit": commit(), "hardware": hardware(), "versions": versions()},
        }  # fmt: skip
        for arguments in (
            ["check", "run.yaml"],
            ["screen", "task.jsonl", "--model", model.name, "--output", "screening"],
            ["train", "run.yaml"],
        ):
            record["commands"].append(measured(arguments, folder))
            print(json.dumps(record["commands"][-1]), flush=True)
    if options.output is not None:
        write_json(options.output, record)


if __name__ == "__main__":
    main()
