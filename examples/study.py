"""A small study of your own: plain SFT against holdfast on one task, over seeds.

    python examples/study.py --model Qwen/Qwen2.5-1.5B-Instruct --task task.jsonl --safety refusals.jsonl --output out

Each run has a folder with a report; finished runs are not repeated, so that a killed study goes on where it stopped.
`holdfast study` runs the paper's protocol with poison, sixteen defenses and a judge: docs/compare.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import holdfast as hf

DEFENSES = ("sft", "holdfast")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--task", required=True, type=Path)
    parser.add_argument("--safety", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of every run")
    given = parser.parse_args(arguments)

    given.output.mkdir(parents=True, exist_ok=True)
    run_file = given.output / "run.yaml"
    run_file.write_text(
        f"model: {given.model}\ntask: {{data: {given.task.absolute()}}}\nsafety: {{data: {given.safety.absolute()}}}\n",
        encoding="utf-8",
    )
    lines = ["defense    monitored examples beyond tau, by seed    mean"]
    for defense in DEFENSES:
        rates = []
        for seed in given.seeds:
            folder = given.output / f"{defense}.s{seed}"
            settings = [f"defense={defense}", f"seed={seed}", f"output_dir={folder}", *given.set]
            result = hf.run(hf.load_config(run_file, settings), resume=folder.exists())
            rates.append(result.values["safety"]["safety"]["monitor"]["violation_rate"])
        lines.append(f"{defense:<10} {'  '.join(f'{rate:.1%}' for rate in rates):<42} {mean(rates):.1%}")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
