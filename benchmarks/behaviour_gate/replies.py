"""Replies of a model to the mixture of prompts, to be labelled by hand: how often do the refusal rules err?

    python benchmarks/behaviour_gate/replies.py WORK --model models/smollm2-135m-instruct --name smollm2-135m-instruct

writes WORK/labelling/NAME.jsonl, for its owner alone: model, id, source, prompt, reply, truncated.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ask import asked, read_rows
from data import write_rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Reply to the mixture of prompts.")
    parser.add_argument("work", type=Path, help="Folder with mixture.jsonl.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", required=True, help="What the rows call the model.")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=int, help="Only so many prompts, for a trial.")
    options = parser.parse_args()
    rows = read_rows(options.work / "mixture.jsonl", options.limit)
    folder = options.work / "labelling"
    replies = asked(
        options.model, [row["prompt"] for row in rows], folder=folder / options.name, tokens=options.tokens,
        batch_size=options.batch_size, dtype=options.dtype,
    )  # fmt: skip
    found = [
        {
            "model": options.name, "id": row["id"], "source": row["source"], "prompt": row["prompt"],
            "reply": replies[row["prompt"]].text, "truncated": replies[row["prompt"]].truncated,
        }
        for row in rows
    ]  # fmt: skip
    write_rows(folder / f"{options.name}.jsonl", found)
    print(f"{len(found)} replies of {options.name}, {sum(row['truncated'] for row in found)} cut")


if __name__ == "__main__":
    main()
