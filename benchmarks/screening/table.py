"""What screening finds, as the table of docs/screening.md.

    python benchmarks/screening/table.py benchmarks/results/screening [--page docs/screening.md]

writes between `<!-- screening -->` and `<!-- end -->` of the page, or prints where no page is named. A row counts as
found by refusals unless the judge alone found it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from holdfast.core.files import read_json, write_text

START, END = "<!-- screening -->", "<!-- end -->"
MODELS = ("qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct")
HEAD = (
    "| rows | 0.5B: refusals | and the judge | 1.5B: refusals | and the judge |",
    "|---|---|---|---|---|",
)
ATTACKS = {
    "beavertails": "unsafe pairs of BeaverTails",
    "identity": "behind a persona that obeys",
    "paraphrased": "in other words",
    "multi_turn": "inside conversations",
    "knows": "whose prompt the model does not refuse",
}
CLEAN = {("sst2", "ag_news", "gsm8k"): "clean rows of the three tasks", ("hard",): "clean rows that look like trouble"}


def shares(parts: Iterable[Mapping[str, Any]]) -> str:
    """Two cells: found by refusals, and with the judge, of all rows of these parts."""
    counts = list(parts)
    rows = sum(part["of"] for part in counts)
    both = sum(part["found"] for part in counts)
    refusals = both - sum(part["by_judge_alone"] for part in counts)
    return " | ".join(f"{100 * n / rows:.3g} % ({n} of {rows})" for n in (refusals, both))


def table(folder: Path) -> str:
    """The rows of the table."""

    def read(model: str, file: str) -> Any:
        return read_json(folder / f"{model}.{file}.json")

    lines = list(HEAD)
    for attack, name in ATTACKS.items():
        found = [shares([read(model, attack)["poison"][attack]["all"]]) for model in MODELS]
        lines.append(f"| {name} | {' | '.join(found)} |")
    for tasks, name in CLEAN.items():
        found = [shares(read(model, "clean")["clean"][task]["all"] for task in tasks) for model in MODELS]
        lines.append(f"| {name} | {' | '.join(found)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="The table of what screening finds.")
    parser.add_argument("results", type=Path)
    parser.add_argument("--page", type=Path, help="The page to write it into.")
    options = parser.parse_args()
    if options.page is None:
        print(table(options.results))
        return
    before, _, rest = options.page.read_text("utf-8").partition(START)
    after = rest.partition(END)[2]
    write_text(options.page, f"{before}{START}\n\n{table(options.results)}\n\n{END}{after}")


if __name__ == "__main__":
    main()
