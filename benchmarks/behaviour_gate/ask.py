"""The model's own refusals: what a run is to hold, and what a certificate of likelihoods scores.

    python benchmarks/behaviour_gate/ask.py WORK --model models/qwen2.5-coder-0.5b-instruct

asks the model as shipped, greedily, every prompt of `task.s*.jsonl`, `asked.jsonl` and `evaluation.jsonl` in WORK, and
keeps the replies that are whole refusals by holdfast's rules:

| file                   |                                                                                |
|------------------------|--------------------------------------------------------------------------------|
| safety.s1.jsonl, ...   | refusals of the prompts in that seed's task file and of `asked`: the safety set |
| evaluation_pairs.jsonl | refusals of the evaluation prompts, for `--by likelihood`                       |
| asked.json             | counts and hashes, without text                                                 |

The replies themselves are stored in WORK/replies: asked once, and a killed run goes on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data import SEEDS, write_rows

from holdfast.core.files import write_json
from holdfast.core.hashing import sha256_file
from holdfast.data.examples import make_example
from holdfast.data.templates import use_template
from holdfast.judging.reply import Reply
from holdfast.judging.reply_classes import REFUSED, sort_reply
from holdfast.models.content import content_of
from holdfast.models.handle import load_unmerged
from holdfast_lab.evaluation.evaluate import Decoding, Questions, answer

Row = dict[str, Any]


def read_rows(path: Path, limit: int | None = None) -> list[Row]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()[:limit]]


def asked(
    model: Path, prompts: Iterable[str], *, folder: Path, tokens: int, batch_size: int, dtype: str
) -> dict[str, Reply]:
    """Every prompt once, with the model's greedy reply."""
    network, tokenizer = load_unmerged(model, dtype=dtype)
    use_template(tokenizer, "chat")
    examples = [make_example(prompt, "", "asked") for prompt in dict.fromkeys(prompts)]
    decoding = Decoding(harm_tokens=tokens, batch_size=batch_size)
    replies = answer(
        network, tokenizer, Questions(harm=examples), decoding, folder=folder, model_sha256=content_of(model).sha256
    )["harm"]
    return {str(example.prompt): reply for example, reply in zip(examples, replies, strict=True)}


def refused(reply: Reply) -> bool:
    """Whether the reply came to its end and is a refusal."""
    return not reply.truncated and sort_reply(reply.text, truncated=False) == REFUSED


def own_refusals(rows: Iterable[Row], replies: dict[str, Reply]) -> list[Row]:
    """The rows whose prompt the model refused, once each, with its refusal as the completion."""
    found: dict[str, Row] = {}
    for row in rows:
        reply = replies[row["prompt"]]
        if refused(reply):
            kept = {"prompt": row["prompt"], "completion": reply.text, "category": row.get("category")}
            found.setdefault(row["prompt"], {name: value for name, value in kept.items() if value})
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Keep the model's own refusals.")
    parser.add_argument("work", type=Path, help="Folder with the files of data.py; the results go there too.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=128, help="Length of the longest reply.")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=int, help="Only so many rows of each file, for a trial.")
    options = parser.parse_args()
    work: Path = options.work
    tasks = {seed: read_rows(work / f"task.s{seed}.jsonl", options.limit) for seed in SEEDS}
    others = read_rows(work / "asked.jsonl", options.limit)
    evaluation = read_rows(work / "evaluation.jsonl", options.limit)
    every = [row["prompt"] for rows in (*tasks.values(), others, evaluation) for row in rows]
    replies = asked(
        options.model, every, folder=work, tokens=options.tokens, batch_size=options.batch_size, dtype=options.dtype
    )
    files = {f"safety.s{seed}.jsonl": own_refusals([*rows, *others], replies) for seed, rows in tasks.items()}
    files["evaluation_pairs.jsonl"] = own_refusals(evaluation, replies)
    record: dict[str, Any] = {
        "asked": len(replies), "truncated": sum(reply.truncated for reply in replies.values()), "files": {},
    }  # fmt: skip
    for name, rows in files.items():
        write_rows(work / name, rows)
        record["files"][name] = {"rows": len(rows), "sha256": sha256_file(work / name)}
    for seed, rows in tasks.items():
        record["files"][f"safety.s{seed}.jsonl"]["of_the_task_file"] = len(own_refusals(rows, replies))
    write_json(work / "asked.json", record)
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
