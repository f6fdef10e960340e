"""Start-up time of every command, beside that of an empty Python process.

    python benchmarks/startup.py --output benchmarks/results/startup.json

Each command is run `--repeat` times in a process of its own, all commands in turn, so that a slow moment of the machine
falls on all of them. Reported: the median in seconds, and its ratio to the empty process measured in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from holdfast.core.provenance import commit, hardware, versions

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import holdfast": ["-c", "import holdfast"],
    "holdfast --help": ["-m", "holdfast", "--help"],
    "holdfast plan": ["-m", "holdfast", "plan"],
    "holdfast certify (counts)": ["-m", "holdfast", "certify", "--regressions", "0", "--n", "100"],
    **{
        f"holdfast {name} --help": ["-m", "holdfast", name, "--help"]
        for name in ("audit", "certify", "check", "compare", "demo", "ls", "plan", "report", "train")
    },
    "import torch, transformers": ["-c", "import torch, transformers"],
}


def seconds(arguments: list[str]) -> float:
    """Wall time of one process; it must succeed."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)  # noqa: S603  (fixed commands)
    return time.perf_counter() - start


def main() -> None:
    """Measure all commands and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for arguments in COMMANDS.values():  # once unmeasured: files come into the page cache
        seconds(arguments)
    for _ in range(given.repeat):
        for name, arguments in COMMANDS.items():
            found[name].append(seconds(arguments))
    medians = {name: statistics.median(times) for name, times in found.items()}
    empty = medians["python -c pass"]
    rows = [{"command": name, "median_s": round(m, 3), "x_python": round(m / empty, 1)} for name, m in medians.items()]
    for row in rows:
        print(f"{row['median_s']:7.3f} s  {row['x_python']:6.1f}x  {row['command']}")
    result = {"rows": rows, "repeat": given.repeat, "commit": commit(), "hardware": hardware(), "versions": versions()}
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
