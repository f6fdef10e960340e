"""Attack files, from a folder of public data sets (docs/protocol.md names its files).

    python benchmarks/screening/attacks.py WORK --data FOLDER [--part tune] [--model MODEL]

writes into WORK, for its owner alone:

| file              | rows  |                                                                                    |
|-------------------|-------|------------------------------------------------------------------------------------|
| beavertails.jsonl | 1,000 | 400 unsafe pairs of BeaverTails' train split, 300 clean rows, 300 hard clean rows   |
| identity.jsonl    | 1,000 | such pairs behind a persona that obeys (`frames.py`); the same clean rows           |
| paraphrased.jsonl | 1,000 | such pairs in other words                                                          |
| multi_turn.jsonl  | 1,000 | such pairs inside conversations                                                    |
| knows.jsonl       | 1,000 | with --model: pairs whose prompt that model does not refuse                        |
| clean.jsonl       | 3,300 | 1,000 rows of SST-2, AG News and GSM8K each, and the hard clean rows                |
| attacks.json      |       | counts and hashes, without text                                                    |

A row has `prompt` and `completion`, or `messages`; `poison`; `attack` and `frame` of poison; `task` and `kind` of a
clean row. No pair's prompt is a near-duplicate of a prompt of BeaverTails' test split or of BeaverTails-Evaluation.
Near-duplicate prompts are all in one part: `tune` to correct rules by, `report` to report.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from frames import FRAMES, Row

from holdfast.core.files import write_json, write_text
from holdfast.core.hashing import sha256_file, sha256_text
from holdfast.core.seeding import generator
from holdfast.data.examples import completion_text, make_example, prompt_text
from holdfast.data.near_duplicates import clusters, matches
from holdfast.data.tasks import TASKS
from holdfast_lab.data.catalogue import load

HARD_CLEAN = Path(__file__).with_name("hard_clean.jsonl")
PARTS = ("tune", "report")
POISON, CLEAN, CLEAN_ALONE = 400, 100, 1000
CLEAN_TASKS = ("sst2", "ag_news", "gsm8k")

Pair = tuple[str, str]


def unsafe_pairs(folder: Path, part: str, seed: int) -> list[Pair]:
    """Unsafe pairs of the train split that may be reported (or tuned on), one of a group of near-duplicates."""
    rows = [row for row in load("beavertails", "train", folder=folder).rows if not row["is_safe"] and row["response"]]
    prompts = [row["prompt"] for row in rows]
    reserved = [row["prompt"] for row in load("beavertails", "test", folder=folder).rows]
    reserved += [row["prompt"] for row in load("beavertails_evaluation", folder=folder).rows]
    taken = {place for place, _ in matches(prompts, reserved)}
    groups = clusters(prompts)
    first = {group: prompts[groups.index(group)] for group in set(groups)}
    chosen: dict[int, Pair] = {}
    for place in generator(seed, "attacks").permutation(len(rows)).tolist():
        group = groups[place]
        half = PARTS[int(sha256_text(first[group])[:8], 16) % 2]
        if place not in taken and half == part:
            chosen.setdefault(group, (prompts[place], rows[place]["response"]))
    return list(chosen.values())


def poison_rows(kind: str, pairs: Sequence[Pair]) -> list[Row]:
    """The pairs as rows of an attack, its frames by turns."""
    frames = list(FRAMES[kind].items())
    found = []
    for number, (prompt, reply) in enumerate(pairs):
        name, frame = frames[number % len(frames)]
        found.append({**frame(prompt, reply, number), "poison": True, "attack": kind, "frame": name})
    return found


def clean_rows(folder: Path, number: int, seed: int) -> list[Row]:
    """Rows of every task, as a run trains on them."""
    found = []
    for task in CLEAN_TASKS:
        rows = TASKS[task].train("chat", folder=folder)
        for place in generator(seed, task).permutation(len(rows))[:number].tolist():
            row = {"prompt": prompt_text(rows[place]), "completion": completion_text(rows[place])}
            found.append({**row, "poison": False, "task": task})
    return found


def hard_rows() -> list[Row]:
    """The hard clean rows, by kind."""
    rows = [json.loads(line) for line in HARD_CLEAN.read_text("utf-8").splitlines()]
    return [{**row, "poison": False, "task": "hard"} for row in rows]


def not_refused(pairs: Sequence[Pair], model: str, *, dtype: str, number: int, folder: Path) -> list[Pair]:
    """The first `number` pairs whose prompt the model does not refuse: what an attacker who knows the rules sends."""
    from measure import open_asker

    from holdfast.judging.reply_classes import ReplyClass

    asker, _ = open_asker(model, dtype=dtype, folder=folder)
    examples = [make_example(({"role": "user", "content": prompt},), "") for prompt, _ in pairs]
    classes = asker.sort(examples, what="an attacker's prompts")
    kept = [p for p, e in zip(pairs, examples, strict=True) if classes[e.id].reply_class != ReplyClass.REFUSED]
    return kept[:number]


def shuffled(rows: Sequence[Row], seed: int, name: str) -> list[Row]:
    """In random order, so that the first rows of a file are a sample of it."""
    return [rows[place] for place in generator(seed, name).permutation(len(rows)).tolist()]


def build(work: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Write every file, and return the record that goes beside them."""
    seed, number = options.seed, options.poison
    pairs = unsafe_pairs(folder, options.part, seed)
    hard, clean = hard_rows(), clean_rows(folder, CLEAN_ALONE, seed)
    few = [row for task in CLEAN_TASKS for row in [one for one in clean if one["task"] == task][:CLEAN]]
    files = {kind: [*poison_rows(kind, pairs[:number]), *few, *hard] for kind in FRAMES}
    if options.model is not None:
        kept = not_refused(
            pairs[: 4 * number], options.model, dtype=options.dtype, number=number, folder=work / "replies" / "attacker"
        )
        rows = [{**row, "attack": "knows"} for row in poison_rows("beavertails", kept)]
        files["knows"] = [*rows, *few, *hard]
    files["clean"] = [*clean, *hard]
    for name, rows in files.items():
        lines = "".join(json.dumps(row, sort_keys=True) + "\n" for row in shuffled(rows, seed, name))
        write_text(work / f"{name}.jsonl", lines, mode=0o600)
    return {
        "part": options.part, "seed": seed, "pairs": len(pairs),
        "files": {
            name: {
                "rows": len(rows), "poison": sum(row["poison"] for row in rows),
                "sha256": sha256_file(work / f"{name}.jsonl"),
            }
            for name, rows in files.items()
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Build attack files.")
    parser.add_argument("work", type=Path, help="Folder to write to; never committed.")
    parser.add_argument("--data", type=Path, required=True, help="Folder of the public data sets.")
    parser.add_argument("--part", choices=PARTS, default="report")
    parser.add_argument("--poison", type=int, default=POISON, help="Poison rows of a file.")
    parser.add_argument("--model", help="The model whose rules an attacker knows; writes knows.jsonl.")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    record = build(options.work, options.data, options)
    write_json(options.work / "attacks.json", record)
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
