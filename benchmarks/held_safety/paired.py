"""Two methods over the same seeds: task loss, harm, and the share of plain SFT's gain in loss that the first has.

    python -m benchmarks.held_safety.paired RESULTS [RESULTS ...] --methods barrier barrier_primal_dual

For each task the seeds that both methods have, at one poison ratio. Loss: differences by seed, with the one-sided 95 %
bound of a t interval. Harm: both means. Gain: (shipped - method) / (shipped - plain SFT), of mean losses over these
seeds. Later folders replace records of the same name in earlier ones.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from benchmarks.held_safety.records import Record, evaluated, read_records, same_prompts, shipped
from scipy.stats import t


class Paired(NamedTuple):
    """One task."""

    seeds: list[int]
    losses: tuple[float, float]  # means of both methods
    difference: float
    upper: float  # one-sided, 95 %
    harm: tuple[float, float]
    gain: tuple[float, float]


def loss_of(record: Record, task: str) -> float:
    return float(record["evaluation"]["tasks"][task]["loss"]["value"])


def paired(
    records: Sequence[Record], methods: tuple[str, str], model: str, task: str, ratio: float, part: str = "reported"
) -> Paired | None:
    """The comparison on one task; None with fewer than two seeds."""
    cell: dict[str, Any] = {"model": model, "task": task, "poison_ratio": ratio, "part": part}
    both: list[Mapping[int, Record]] = [
        {r["seed"]: r for r in evaluated(records, method=method, **cell)} for method in (*methods, "sft")
    ]
    seeds = sorted(set(both[0]) & set(both[1]) & set(both[2]))
    if len(seeds) < 2:
        return None
    same_prompts([one[seed] for one in both for seed in seeds], ["harm", task])
    losses = [[loss_of(one[seed], task) for seed in seeds] for one in both]
    apart = [a - b for a, b in zip(losses[0], losses[1], strict=True)]
    upper = mean(apart) + float(t.ppf(0.95, len(seeds) - 1)) * stdev(apart) / math.sqrt(len(seeds))
    harm = [mean(one[seed]["evaluation"]["shares"]["HS"] for seed in seeds) for one in both]
    start = loss_of(shipped(records, model, part), task)
    gain = [(start - mean(own)) / (start - mean(losses[2])) for own in losses[:2]]
    return Paired(seeds, (mean(losses[0]), mean(losses[1])), mean(apart), upper, (harm[0], harm[1]), (gain[0], gain[1]))


def lines(records: Sequence[Record], methods: tuple[str, str], model: str, ratio: float) -> list[str]:
    """A table in Markdown."""
    first, second = methods
    found = [
        f"| task | seeds | loss, {first} | {second} | difference (upper bound) | HS | gain in loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for task in ("sst2", "gsm8k", "ag_news"):
        one = paired(records, methods, model, task, ratio)
        if one is not None:
            found.append(
                f"| {task} | {', '.join(map(str, one.seeds))} | {one.losses[0]:.4f} | {one.losses[1]:.4f} "
                f"| {one.difference:+.4f} ({one.upper:+.4f}) | {one.harm[0]:.3f}, {one.harm[1]:.3f} "
                f"| {one.gain[0]:.1%}, {one.gain[1]:.1%} |"
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--methods", nargs=2, required=True)
    parser.add_argument("--model", default="0.5b")
    parser.add_argument("--poison", type=float, default=0.25)
    given = parser.parse_args()
    records = {record["name"]: record for folder in given.results for record in read_records(folder)}
    print("\n".join(lines(list(records.values()), tuple(given.methods), given.model, given.poison)))


if __name__ == "__main__":
    main()
