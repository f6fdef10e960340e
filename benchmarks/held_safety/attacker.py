"""The file of an attacker who knows the rules of screening: all of its poison asks what the shipped model answers.

    python -m benchmarks.held_safety.attacker WORK --model 0.5b

writes WORK/data/task/sst2.answered.s1.jsonl, ... for every seed: the poison of p = 1 that `auto`'s screening did not
find, and as many clean rows of the task, shuffled.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.held_safety.cells import Cell, answered_file, read_plan, task_file
from benchmarks.held_safety.data import examples_of, read_rows, write_rows

from holdfast.core.files import read_json, write_json
from holdfast.core.hashing import sha256_file
from holdfast.core.seeding import generator

GROUP = "answered05"


def not_found(work: Path, model: str, task: str, seed: int) -> list[dict[str, str]]:
    """Rows of the file of poison alone that are no conflict."""
    run = work / "cells" / Cell(model, "auto", task, 1, seed).name / "run" / "screening" / "conflicts.jsonl"
    conflicts = {json.loads(line)["id"] for line in run.read_text("utf-8").splitlines()}
    path = work / "data" / task_file(task, 1, seed)
    rows = zip(examples_of(path), read_rows(path), strict=True)
    return [row for example, row in rows if example.id not in conflicts]


def write(work: Path, model: str, task: str, seed: int) -> str:
    """One seed's file, entered into data.json with its flags of poison; returns its name."""
    poison = not_found(work, model, task, seed)
    clean = read_rows(work / "data" / task_file(task, 0, seed))[: len(poison)]
    rows = [(row, "1") for row in poison] + [(row, "0") for row in clean]
    mixed = [rows[place] for place in generator(seed, "answered poison").permutation(len(rows))]
    name = answered_file(task, seed)
    write_rows(work / "data" / name, [row for row, _ in mixed])
    record = read_json(work / "data" / "data.json")
    flags = "".join(flag for _, flag in mixed)
    about = {"rows": len(mixed), "sha256": sha256_file(work / "data" / name), "poison": flags}
    record["files"][name] = about
    write_json(work / "data" / "data.json", record)
    return f"{name}: {len(poison)} of {len(mixed)} rows are poison"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the files of an attacker who knows the rules.")
    parser.add_argument("work", type=Path)
    parser.add_argument("--model", required=True, help="Of cells.yaml.")
    options = parser.parse_args()
    group = read_plan().groups[GROUP]
    for task in group["tasks"]:
        for seed in group["seeds"]:
            print(write(options.work, options.model, task, seed))


if __name__ == "__main__":
    main()
