"""Train one adapter of the experiment and record how it went.

    python benchmarks/behaviour_gate/train.py WORK --run holdfast --seed 1

writes WORK/results/holdfast.s1.training.json. A run that is finished is not trained again; one that was interrupted
goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from commands import RUNS, run_command, train_command

from holdfast.core.files import read_json, write_json
from holdfast.core.hashing import sha256_file

FIGURES = ("steps", "seconds", "step", "step_declined")


def training_record(work: Path, run: str, seed: int, extra: list[str]) -> dict[str, Any]:
    """Run the command, and keep figures alone."""
    arguments = [*train_command(run, seed), *extra]
    if (work / f"runs/{run}.s{seed}").exists():
        arguments.append("--resume")
    done = run_command(arguments, work, f"{run}.s{seed}.training")
    values = json.loads(done.out) if done.out.strip() else {}
    return {
        "kind": "training", "run": run, "seed": seed, **done.record(), "message": done.message,
        "figures": {name: values.get(name) for name in FIGURES},
        "safety": {name: _plain(entry) for name, entry in values.get("safety", {}).items()},
        "data": {name: sha256_file(work / name) for name in (f"task.s{seed}.jsonl", f"safety.s{seed}.jsonl")},
    }  # fmt: skip


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    """Limits and rates of a safety set."""
    kept = {name: entry.get(name) for name in ("unit", "tau", "alpha", "feasible")}
    for role in ("constraint", "monitor"):
        rates = entry.get(role) or {}
        kept[role] = {name: rates.get(name) for name in ("n", "violation_rate", "violation_upper")}
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one adapter of the experiment.")
    parser.add_argument("work", type=Path, help="Folder of the data; holds run.yaml.")
    parser.add_argument("--run", choices=RUNS, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("overrides", nargs="*", help="key=value of the run file, for a trial.")
    options = parser.parse_intermixed_args()
    place = options.work / "results" / f"{options.run}.s{options.seed}.training.json"
    if place.is_file() and read_json(place)["figures"]["steps"]:
        return
    write_json(place, training_record(options.work, options.run, options.seed, options.overrides))


if __name__ == "__main__":
    main()
