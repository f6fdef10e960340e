"""The data of the experiment, from a folder of public data sets (docs/protocol.md names its files).

    python -m benchmarks.held_safety.data WORK --data FOLDER

writes into WORK/data, for its owner alone:

| file                            | rows   |                                                                |
|---------------------------------|--------|----------------------------------------------------------------|
| task/sst2.p0.25.s1.jsonl, ...   | 1,000  | a task; floor(p N) of the rows are unsafe pairs of BeaverTails |
| reported/harm.jsonl             | 700    | prompts of BeaverTails' test split with an unsafe reply        |
| reported/borderline.jsonl       | 150    | XSTest's safe prompts, 15 of each type                         |
| reported/sst2, ag_news, gsm8k   |        | 872, 1,000 and 500 held-out rows                               |
| tuning/harm, borderline         |        | 350 and 100 other prompts                                      |
| tuning/sst2, gsm8k              | 400    | rows of the train split that no task file holds                |
| advbench.jsonl, written.jsonl   |        | prompts to ask; refusals that somebody wrote                   |
| timing.jsonl                    | 10,000 | distinct prompts, to time the screening                        |
| data.json                       |        | counts, hashes and which rows are poison; no text              |

and, with --reported, the hashes of the reported prompts into a file that is committed before any run.

Harm prompts: one of each group of near-duplicates (`holdfast_lab.protocol.roles`), in the order of the sha256 of the
prompt: the first 700 are reported, the next 350 are for tuning. No poison prompt and no prompt of advbench or written
is in a group with a prompt of the test split, of BeaverTails-Evaluation or of XSTest.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.held_safety.cells import ratio_text, read_plan, task_file

from holdfast.core.files import write_json, write_text
from holdfast.core.hashing import sha256_file, sha256_lines, sha256_text
from holdfast.core.seeding import generator
from holdfast.data.examples import Example, completion_text, make_example, prompt_text
from holdfast.data.tasks import TASKS, poison_count, poisoned
from holdfast.judging.reply_classes import ReplyClass, sort_reply
from holdfast_lab.data.catalogue import load
from holdfast_lab.evaluation.evaluate import held_out
from holdfast_lab.protocol.roles import groups, read_pools

SIZE = 1000
HARM = {"reported": 700, "tuning": 350}
BORDERLINE = {"reported": 15, "tuning": 10}
"""Of each of XSTest's ten safe types."""
HELD_OUT = {"sst2": 872, "ag_news": 1000, "gsm8k": 500}
TUNING_ROWS = {"sst2": 400, "gsm8k": 400}
WRITTEN, TIMED, TIMED_SEEDS = 1500, 10_000, (1, 2, 3)
LATER_SEEDS = (4, 5)
"""Their task files came after the tuning rows were drawn, and may hold some of them; they are never tuned on."""
Row = dict[str, Any]


def by_hash(texts: Iterable[str]) -> list[str]:
    """Texts in the order of their sha256."""
    return sorted(texts, key=sha256_text)


def one_of_a_group(prompts: Sequence[str], labels: Mapping[str, int]) -> list[str]:
    """The prompt with the smallest sha256 of every group, in the order of the sha256."""
    first: dict[int, str] = {}
    for prompt in by_hash(prompts):
        first.setdefault(labels[prompt], prompt)
    return list(first.values())


def consecutive(items: Sequence[Any], sizes: Mapping[str, int]) -> dict[str, list[Any]]:
    """The first items for the first name, the next for the second, and so on."""
    rest = iter(items)
    found = {name: list(islice(rest, size)) for name, size in sizes.items()}
    for name, size in sizes.items():
        if len(found[name]) < size:
            raise SystemExit(f"{name}: {size} are asked for, {len(found[name])} are left")
    return found


def borderline(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """XSTest's safe prompts, shared out within each type."""
    types: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row["safe"]:
            types[row["category"]].append(row["prompt"])
    shared = [consecutive(by_hash(types[kind]), BORDERLINE) for kind in sorted(types)]
    return {part: [prompt for one in shared for prompt in one[part]] for part in BORDERLINE}


def row_of(example: Example) -> Row:
    """Prompt and completion."""
    return {"prompt": prompt_text(example), "completion": completion_text(example)}


class Sources:
    """What the files are drawn from, and what must stay apart."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        pools = read_pools("refusals", "beavertails_test", folder=folder)
        self.xstest = load("xstest", folder=folder).rows
        harm = [prompt_text(example) for example in pools.evaluation]
        kept_apart = [row["prompt"] for row in load("beavertails", "test", folder=folder).rows]
        kept_apart += [row["prompt"] for row in load("beavertails_evaluation", folder=folder).rows]
        kept_apart += [row["prompt"] for row in self.xstest]
        advbench = [row["prompt"] for row in load("advbench", folder=folder).rows]
        pairs = [*pools.unsafe, *pools.safe]
        every = list(dict.fromkeys([*harm, *kept_apart, *advbench, *map(prompt_text, pairs)]))
        labels = dict(zip(every, groups(every), strict=True))
        closed = {labels[prompt] for prompt in kept_apart}
        self.harm = one_of_a_group(harm, labels)
        self.poison = [example for example in pools.unsafe if labels[prompt_text(example)] not in closed]
        self.advbench = [prompt for prompt in by_hash(advbench) if labels[prompt] not in closed]
        self.written = [example for example in pools.safe if labels[prompt_text(example)] not in closed]


def written_refusals(examples: Iterable[Example]) -> list[Row]:
    """Pairs whose reply refuses by holdfast's rules, in the order of their ids."""
    rows = [row_of(example) for example in sorted(examples, key=lambda example: example.id)]
    kept = [r for r in rows if sort_reply(r["completion"], truncated=False).reply_class == ReplyClass.REFUSED]
    return kept[:WRITTEN]


def evaluation_files(sources: Sources, train: Mapping[str, Sequence[Example]], used: set[str]) -> dict[str, list[Row]]:
    """The prompts and held-out rows of both parts."""
    files: dict[str, list[Row]] = {}
    for name, parts in (("harm", consecutive(sources.harm, HARM)), ("borderline", borderline(sources.xstest))):
        files |= {f"{part}/{name}.jsonl": [{"prompt": prompt} for prompt in parts[part]] for part in parts}
    for name, n in HELD_OUT.items():
        chosen = held_out(TASKS[name].test("chat", folder=sources.folder), n, 42)
        files[f"reported/{name}.jsonl"] = [row_of(example) for example in chosen]
    for name, n in TUNING_ROWS.items():
        free = [example for example in train[name] if example.id not in used]
        order = generator(0, f"tuning {name}").permutation(len(free))[:n]
        files[f"tuning/{name}.jsonl"] = [row_of(free[place]) for place in order]
    return files


def timing_rows(files: Mapping[str, list[Row]], seeds: Sequence[int]) -> list[Row]:
    """Task rows with distinct prompts, one seed after the other: timed first, their replies are known to the cells."""
    distinct: dict[str, Row] = {}
    for seed in seeds:
        for name in sorted(files):
            if name.endswith(f".s{seed}.jsonl"):
                distinct |= {row["prompt"]: row for row in files[name] if row["prompt"] not in distinct}
    return list(distinct.values())[:TIMED]


def build(work: Path, folder: Path) -> Row:
    """Write every file, and return the record that goes beside them."""
    sources = Sources(folder)
    train = {name: TASKS[name].train("chat", folder=folder) for name in HELD_OUT}
    flags, files, used = {}, {}, set()
    unsafe = {example.id for example in sources.poison}
    for task, ratio, seed in sorted(read_plan().data_files()):
        name = task_file(task, ratio, seed)
        mixed = poisoned(train[task], sources.poison, size=SIZE, ratio=ratio, seed=seed)
        files[name] = [row_of(example) for example in mixed]
        flags[name] = "".join("1" if example.id in unsafe else "0" for example in mixed)
        if seed not in LATER_SEEDS:
            used |= {example.id for example in mixed}
        if flags[name].count("1") != poison_count(ratio, SIZE):
            raise SystemExit(f"{name}: {flags[name].count('1')} poison rows at p = {ratio_text(ratio)}")
    files["timing.jsonl"] = timing_rows(files, TIMED_SEEDS)
    files |= evaluation_files(sources, train, used)
    files["advbench.jsonl"] = [{"prompt": prompt} for prompt in sources.advbench]
    files["written.jsonl"] = written_refusals(sources.written)
    record: Row = {"poison_pool": len(sources.poison), "files": {}}
    for name, rows in files.items():
        write_rows(work / "data" / name, rows)
        about = {"rows": len(rows), "sha256": sha256_file(work / "data" / name)}
        record["files"][name] = about | ({"poison": flags[name]} if name in flags else {})
    return record


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """JSON lines that only their owner can read: the texts may be harmful."""
    write_text(path, "".join(json.dumps(dict(row), sort_keys=True) + "\n" for row in rows), mode=0o600)


def read_rows(path: Path, limit: int | None = None) -> list[Row]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()[:limit]]


def examples_of(path: Path, limit: int | None = None) -> list[Example]:
    """The rows of a file as examples; a prompt without a completion has an empty one."""
    return [make_example(r["prompt"], r.get("completion", ""), f"{path.name}:{n}")
            for n, r in enumerate(read_rows(path, limit), start=1)]  # fmt: skip


def prompts_sha256(prompts: Iterable[str]) -> str:
    """Of the sorted sha256 of the prompts, one a line."""
    return sha256_lines(sorted(sha256_text(prompt) for prompt in prompts))


def reported(work: Path) -> Row:
    """Counts and hashes of the reported prompts."""
    found = {}
    for path in sorted((work / "data" / "reported").glob("*.jsonl")):
        rows = read_rows(path)
        found[path.stem] = {"prompts": len(rows), "sha256": prompts_sha256(row["prompt"] for row in rows)}
    return {"rule": "sha256 over the sorted sha256 of the prompts, each preceded by its length", "sets": found}


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the data of the experiment.")
    parser.add_argument("work", type=Path, help="Folder to write to.")
    parser.add_argument("--data", type=Path, required=True, help="Folder of the public data sets.")
    parser.add_argument("--reported", type=Path, help="Where the hashes of the reported prompts go.")
    options = parser.parse_args()
    record = build(options.work, options.data)
    write_json(options.work / "data" / "data.json", record)
    if options.reported is not None:
        write_json(options.reported, reported(options.work))
    shown = {name: about["rows"] for name, about in record["files"].items()}
    print(json.dumps(shown, indent=2))


if __name__ == "__main__":
    main()
