"""What steps that only restore cost, from the records: their share, and whether loss and accuracy go with it.

    python -m benchmarks.held_safety.restoring benchmarks/results/held_safety

Shares are pooled over the steps of all runs that gave a model; p = 1 has no task. Loss is divided by plain SFT's of the
same cell, plain SFT's accuracy is subtracted. g and the share beyond tau are those of the refusals at the run's end.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import correlation

from benchmarks.held_safety.records import Record, among, evaluated, read_records
from benchmarks.held_safety.table import looked


def share(cells: Sequence[Record]) -> float:
    """Steps that only restored, of all steps of these runs."""
    runs = [cell["training"]["result"] for cell in cells]
    restored = sum(run["events"]["kinds"].get("restoration", 0) for run in runs)
    return float(restored / sum(run["steps"] for run in runs))


def line(cells: Sequence[Record], plain: dict[tuple[object, ...], Record], task: str) -> str:
    """The figures of one task."""
    shares = [share([cell]) for cell in cells]
    own, sft = ([one["evaluation"]["tasks"][task] for one in some] for some in (cells, [plain[key(c)] for c in cells]))
    losses = [a["loss"]["value"] / b["loss"]["value"] for a, b in zip(own, sft, strict=True)]
    accuracy = [a["FA"]["value"] - b["FA"]["value"] for a, b in zip(own, sft, strict=True)]
    return (
        f"| {task} | {len(cells)} | {share(cells):.3f} | {max(shares):.3f} | {correlation(shares, losses):+.2f} "
        f"| {max(losses):.3f} | {correlation(shares, accuracy):+.2f} |"
    )


def key(cell: Record) -> tuple[object, ...]:
    """What a cell shares with plain SFT's."""
    return tuple(cell[name] for name in ("model", "task", "poison_ratio", "seed"))


def main() -> None:
    parser = argparse.ArgumentParser(description="What restoring costs.")
    parser.add_argument("results", type=Path, help="A folder of records.")
    parser.add_argument("--look", type=Path, help="Folder whose runs of `auto` are taken instead.")
    parser.add_argument("--cells-of", type=Path, help="Folder: only those runs of `auto` whose cells it has too.")
    options = parser.parse_args()
    records = read_records(options.results)
    if options.look is not None:
        records = looked(records, read_records(options.look))
    records = among(records, options.cells_of)
    cells = evaluated(records, method="auto", part="reported")
    plain = {key(one): one for one in evaluated(records, method="sft", part="reported")}
    if plain:
        print("| task | runs | restored | most in a run | with loss | largest loss / SFT | with accuracy |")
        print("|---|---|---|---|---|---|---|")
    for task in ("sst2", "ag_news", "gsm8k"):
        chosen = [cell for cell in cells if cell["task"] == task and cell["poison_ratio"] < 1]
        if plain and chosen:
            print(line(chosen, plain, task))
    for model in ("0.5b", "1.5b"):
        chosen = [cell for cell in cells if cell["model"] == model]
        if chosen:
            most = max(share([cell]) for cell in chosen)
            hard = [cell for cell in chosen if cell["task"] == "gsm8k"]
            print(f"{model}: restored {share(chosen):.3f}, most in a run {most:.3f}, gsm8k {share(hard):.3f}")
    held = [cell["training"]["result"]["safety"]["refusals"]["constraint"] for cell in cells]
    g, beyond = [one["g"] for one in held], [one["violation_rate"] for one in held]
    print(f"all {len(cells)} runs: restored {share(cells):.4f}")
    print(f"g of the refusals above 0 in {sum(x > 0 for x in g)}, largest {max(g):.3f}")
    print(f"of the refusals of a run at most {max(beyond):.4f} beyond tau")


if __name__ == "__main__":
    main()
