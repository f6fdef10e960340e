"""How long screening 10,000 prompts takes.

    python -m benchmarks.held_safety.timing WORK --model 0.5b

asks the shipped model the prompts of WORK/data/timing.jsonl with `holdfast screen`, in a process of its own, and writes
WORK/screening/timing.0.5b.json: seconds from start to end, loading and the bundled prompts included, and its figures.
They are prompts of the task files, so that the cells find most of their replies in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.held_safety.cells import read_plan

from holdfast.core.files import write_json
from holdfast.core.provenance import commit, hardware, versions


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the screening of 10,000 prompts.")
    parser.add_argument("work", type=Path)
    parser.add_argument("--model", required=True, help="Of cells.yaml.")
    parser.add_argument("extra", nargs="*", help="Options of holdfast screen, after --.")
    options = parser.parse_args()
    work = options.work.resolve()
    place = work / "screening" / f"timing.{options.model}.json"
    if place.is_file():
        return
    model = read_plan().models[options.model]
    command = [
        "screen", "data/timing.jsonl", "--model", f"models/{model['folder']}", "--unsorted", "accept",
        "--output", f"screening/timing.{options.model}", "--json", *options.extra,
    ]  # fmt: skip
    start = time.monotonic()
    done = subprocess.run(  # noqa: S603  (our own program, no shell)
        [sys.executable, "-m", "holdfast", *command], cwd=work, stdout=subprocess.PIPE, text=True, check=False
    )
    seconds = round(time.monotonic() - start, 1)
    figures = json.loads(done.stdout) if done.returncode == 0 else None
    record = {
        "kind": "timing", "model": options.model, "command": ["holdfast", *command], "exit_code": done.returncode,
        "seconds": seconds, "figures": figures,
        "provenance": {
            "commit": commit() or os.environ.get("HOLDFAST_COMMIT"), "hardware": hardware(), "versions": versions(),
        },
    }  # fmt: skip
    write_json(place if figures else place.with_suffix(".failed.json"), record)
    print(f"{options.model}: exit code {done.returncode}, {seconds} s")


if __name__ == "__main__":
    main()
