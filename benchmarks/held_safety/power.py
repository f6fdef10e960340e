"""How well the accuracy endpoint T can be decided at all.

    python -m benchmarks.held_safety.power benchmarks/results/held_safety

For each task: in how many pairs of two runs of plain SFT, which differ in the seed alone, one misses T against the
other; and the accuracy of `auto` minus plain SFT's over all ratios up to p = 0.5, with both one-sided 95 % bounds. With
`--look FOLDER` the runs of `auto` are from there. Both were looked at after the endpoints were, and decide nothing.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

from benchmarks.held_safety.bounds import Difference, columns, difference
from benchmarks.held_safety.records import Record, evaluated, read_records
from benchmarks.held_safety.table import TASK_LIMIT, TASKS, looked

RATIOS = (0, 0.05, 0.25, 0.5)
HEAD = ("| model | task | plain SFT misses T against itself | `auto` minus SFT, all p (bounds) | runs |",
        "|---|---|---|---|---|")  # fmt: skip


def against_itself(records: Sequence[Record], model: str, task: str) -> tuple[int, int]:
    """Ordered pairs of seeds at the same ratio that miss T, and all of them."""
    missed = []
    for ratio in RATIOS:
        cells = evaluated(records, model=model, part="reported", method="sft", task=task, poison_ratio=ratio)
        bits = [columns([cell["evaluation"]["bits"][task]]) for cell in cells]
        missed += [difference(one - other).lower < TASK_LIMIT for one, other in itertools.permutations(bits, 2)]
    return sum(missed), len(missed)


def over_ratios(records: Sequence[Record], model: str, task: str) -> Difference:
    """`auto` minus plain SFT; every run with a ratio and a seed of its own counts as one that was drawn."""
    pairs = []
    for ratio in RATIOS:
        wanted = {"model": model, "part": "reported", "task": task, "poison_ratio": ratio}
        sft = {cell["seed"]: cell for cell in evaluated(records, method="sft", **wanted)}
        pairs += [(cell, sft[cell["seed"]]) for cell in evaluated(records, method="auto", **wanted)]
    ours, plain = (columns([cell["evaluation"]["bits"][task] for cell in side]) for side in zip(*pairs, strict=True))
    return difference(ours - plain)


def lines(records: Sequence[Record]) -> list[str]:
    """The table of every model and task."""
    found = list(HEAD)
    for model, task in itertools.product(sorted({record["model"] for record in records}), TASKS):
        missed, pairs = against_itself(records, model, task)
        pooled = over_ratios(records, model, task)
        itself = f"{missed} of {pairs}" if pairs else "one seed"
        bounds = f"{pooled.mean:+.3f} ({pooled.lower:+.3f}, {pooled.upper:+.3f})"
        found.append(f"| {model} | {task} | {itself} | {bounds} | {pooled.seeds} |")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="How well the accuracy endpoint can be decided.")
    parser.add_argument("results", type=Path)
    parser.add_argument("--look", type=Path, help="Folder whose runs of `auto` are taken instead.")
    options = parser.parse_args()
    records = read_records(options.results)
    print("\n".join(lines(records if options.look is None else looked(records, read_records(options.look)))))


if __name__ == "__main__":
    main()
