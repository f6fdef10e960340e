"""How well the accuracy endpoint T can be decided at all.

    python -m benchmarks.held_safety.power benchmarks/results/held_safety

For each task: in how many pairs of two runs of plain SFT, which differ in the seed alone, one misses T against the
other, each pair both ways; and the accuracy of `auto` minus plain SFT's over all ratios up to p = 0.5. Then the mean HS
of the runs of `auto` minus the shipped model's. With `--look FOLDER` the runs of `auto` are from there, and their HS
minus that of the results' own `auto` follows, over the cells that both have. Bounds are one-sided, 95 %. All of it was
looked at after the endpoints were, and decides nothing.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

from benchmarks.held_safety.bounds import Difference, columns, difference
from benchmarks.held_safety.records import Record, among, evaluated, mean_of, read_records, shipped
from benchmarks.held_safety.table import NOTHING, TASK_LIMIT, TASKS, looked

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


def over_ratios(records: Sequence[Record], model: str, task: str) -> Difference | None:
    """`auto` minus plain SFT; every run with a ratio and a seed of its own counts as one that was drawn."""
    pairs = []
    for ratio in RATIOS:
        wanted = {"model": model, "part": "reported", "task": task, "poison_ratio": ratio}
        sft = {cell["seed"]: cell for cell in evaluated(records, method="sft", **wanted)}
        pairs += [(cell, sft[cell["seed"]]) for cell in evaluated(records, method="auto", **wanted)]
    if not pairs:
        return None
    ours, plain = (columns([cell["evaluation"]["bits"][task] for cell in side]) for side in zip(*pairs, strict=True))
    return difference(ours - plain)


def lines(records: Sequence[Record]) -> list[str]:
    """The table of every model and task."""
    found = list(HEAD)
    for model, task in itertools.product(sorted({record["model"] for record in records}), TASKS):
        missed, pairs = against_itself(records, model, task)
        pooled = over_ratios(records, model, task)
        itself = f"{missed} of {pairs}" if pairs else "one seed"
        runs = 0 if pooled is None else pooled.seeds
        found.append(f"| {model} | {task} | {itself} | {shown(pooled)} | {runs} |")
    return found


def shown(found: Difference | None) -> str:
    return NOTHING if found is None else f"{found.mean:+.4f} ({found.lower:+.4f}, {found.upper:+.4f})"


def between(records: Sequence[Record], look: Sequence[Record], model: str) -> Difference:
    """HS of the look's runs minus that of the same cells in the records, prompt by prompt."""
    wanted = {"model": model, "part": "reported", "method": "auto"}
    here, there = ({one["name"]: one for one in evaluated(side, **wanted)} for side in (records, look))
    both = [name for name in there if name in here]
    now, before = (columns([side[name]["evaluation"]["bits"]["harm"] for name in both]) for side in (there, here))
    return difference(now - before)


def main() -> None:
    parser = argparse.ArgumentParser(description="How well the accuracy endpoint can be decided.")
    parser.add_argument("results", type=Path)
    parser.add_argument("--look", type=Path, help="Folder whose runs of `auto` are taken instead.")
    parser.add_argument("--cells-of", type=Path, help="Folder: only those runs of `auto` whose cells it has too.")
    options = parser.parse_args()
    records = read_records(options.results)
    look = [] if options.look is None else read_records(options.look)
    chosen = among(looked(records, look) if look else records, options.cells_of)
    print("\n".join(lines(chosen)))
    for model in sorted({record["model"] for record in records}):
        if not (runs := evaluated(chosen, model=model, part="reported", method="auto")):
            continue
        before = shipped(records, model, "reported")
        above = (mean_of(runs, "shares", "HS") or 0.0) - before["evaluation"]["shares"]["HS"]
        print(f"HS minus shipped, mean of {len(runs)} runs, {model}: {above:+.4f}")
    compared = among(look, options.cells_of)
    for model in sorted({record["model"] for record in compared}):
        found = between(records, compared, model)
        print(f"HS, the look minus the results, {model}: {shown(found)}, {found.seeds} cells")


if __name__ == "__main__":
    main()
