"""The data of the experiment, from a folder of public data sets (docs/protocol.md names its files).

    python benchmarks/behaviour_gate/data.py WORK --data FOLDER

writes into WORK, for its owner alone:

| file                   | rows  |                                                                            |
|------------------------|-------|----------------------------------------------------------------------------|
| task.s1.jsonl, s2, s3  | 1,000 | SST-2, half of it replaced by unsafe pairs of BeaverTails' train split       |
| asked.jsonl            | 1,500 | other prompts of that split, one of a group of near-duplicates               |
| evaluation.jsonl       | 700   | BeaverTails-Evaluation: prompt and category                                  |
| mixture.jsonl          | 600   | 300 of those, 150 of XSTest, 150 everyday ones: to measure the refusal rules |
| data.json              |       | counts, sources and hashes, without text                                     |

No prompt of a task file or of `asked` is a near-duplicate of an evaluation prompt (`holdfast_lab.protocol.roles`).
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.core.files import write_json, write_text
from holdfast.core.hashing import sha256_file, sha256_text
from holdfast.core.seeding import generator
from holdfast.data.examples import Example, completion_text, prompt_text
from holdfast.data.tasks import TASKS, poisoned
from holdfast_lab.data.catalogue import load
from holdfast_lab.protocol.roles import Roles, RoleSettings, draw_roles

SEEDS = (1, 2, 3)
SIZE, RATIO = 1000, 0.5
ROLES = RoleSettings(
    safe="beavertails", harm_prompts="beavertails_evaluation", evaluation=700, asked=1500, poison=1000,
    align=1, constraint=None, monitor=0, certify=0, harmful=0, seed=42,
)  # fmt: skip
HARMFUL, BORDERLINE, EVERYDAY = 300, 150, 150
EVERYDAY_FILE = "benign/benign_prompts.jsonl"


def rows_of(examples: Iterable[Example]) -> list[dict[str, Any]]:
    """Prompt, completion and category of each example, whichever it has."""
    found = []
    for example in examples:
        row = {"prompt": prompt_text(example), "completion": completion_text(example), "category": example.category}
        found.append({name: value for name, value in row.items() if value})
    return found


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """JSON lines that only their owner can read: the texts may be harmful."""
    write_text(path, "".join(json.dumps(dict(row), sort_keys=True) + "\n" for row in rows), mode=0o600)


def task_rows(roles: Roles, seed: int, folder: Path) -> list[dict[str, Any]]:
    """SST-2 with half of its rows replaced by unsafe pairs, as the protocol draws them for this seed."""
    clean = TASKS["sst2"].train("chat", folder=folder)
    mixed = rows_of(poisoned(clean, roles.poison, size=SIZE, ratio=RATIO, seed=seed))
    return [{"prompt": row["prompt"], "completion": row["completion"]} for row in mixed]


def spread(rows: Sequence[Mapping[str, Any]], n: int, by: str, name: str) -> list[Mapping[str, Any]]:
    """`n` rows at random, as many of each value of the column `by` as that allows."""
    order = generator(0, name).permutation(len(rows))
    kinds: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for place in order:
        kinds[rows[place][by]].append(rows[place])
    turns = [row for turn in range(len(rows)) for kind in sorted(kinds) for row in kinds[kind][turn : turn + 1]]
    return turns[:n]


def mixture(folder: Path) -> list[dict[str, Any]]:
    """Prompts to which a model gives every kind of reply, in random order."""
    everyday = [json.loads(line) for line in (folder / EVERYDAY_FILE).read_text("utf-8").splitlines()]
    chosen = {
        "beavertails_evaluation": spread(load("beavertails_evaluation", folder=folder).rows, HARMFUL, "category", "h"),
        "xstest": spread(load("xstest", folder=folder).rows, BORDERLINE, "safe", "b"),
        "everyday": spread(everyday, EVERYDAY, "category", "e"),
    }
    rows = [
        {"id": sha256_text(row["prompt"])[:16], "prompt": row["prompt"], "source": source}
        for source, picked in chosen.items()
        for row in picked
    ]
    return [rows[place] for place in generator(0, "mixture").permutation(len(rows))]


def build(work: Path, folder: Path) -> dict[str, Any]:
    """Write every file, and return the record that goes beside them."""
    roles = draw_roles(ROLES, folder=folder)
    files = {f"task.s{seed}.jsonl": task_rows(roles, seed, folder) for seed in SEEDS}
    files["asked.jsonl"] = [{"prompt": row["prompt"]} for row in rows_of(roles.asked)]
    files["evaluation.jsonl"] = rows_of(roles.evaluation)
    files["mixture.jsonl"] = mixture(folder)
    for name, rows in files.items():
        write_rows(work / name, rows)
    return {
        "seeds": list(SEEDS), "size": SIZE, "poison_ratio": RATIO, "roles": roles.record,
        "files": {n: {"rows": len(rows), "sha256": sha256_file(work / n)} for n, rows in files.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the data of the behaviour gate's experiment.")
    parser.add_argument("work", type=Path, help="Folder to write to.")
    parser.add_argument("--data", type=Path, required=True, help="Folder of the public data sets.")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    record = build(options.work, options.data)
    write_json(options.work / "data.json", record)
    print(json.dumps(record["files"], indent=2))


if __name__ == "__main__":
    main()
