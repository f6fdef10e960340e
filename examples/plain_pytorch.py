"""The filter in a loop of your own: a language model, an optimizer, and a constraint on its refusals. No trainer.

    python examples/plain_pytorch.py --model Qwen/Qwen2.5-0.5B-Instruct --task task.jsonl --safety refusals.jsonl

Both files have a prompt and a completion per line. D_i is the mean token loss of refusal i minus its loss before
training; `ChanceConstraint` turns the D_i into g, and `SafetyFilter.step(g)` takes the place of `optimizer.step()`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import holdfast as hf

IGNORED = -100


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def batch_of(rows: Sequence[dict[str, str]], tokenizer: Any) -> dict[str, torch.Tensor]:
    """Chat turns, padded; only the reply's tokens have a label."""
    tokens, labels = [], []
    for row in rows:
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
        whole = tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
        tokens.append(whole)
        labels.append([IGNORED] * len(prompt) + whole[len(prompt) :])
    longest = max(map(len, tokens))

    def padded(values: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([value + [fill] * (longest - len(value)) for value in values])

    mask = [[1] * len(value) for value in tokens]
    return {
        "input_ids": padded(tokens, tokenizer.pad_token_id), "attention_mask": padded(mask, 0),
        "labels": padded(labels, IGNORED),
    }  # fmt: skip


def losses(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean loss per token of each reply, in nats."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].float()
    targets = batch["labels"][:, 1:]
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    return each.sum(1) / (targets != IGNORED).sum(1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--task", required=True, type=Path)
    parser.add_argument("--safety", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-5, help="learning rate")
    given = parser.parse_args(arguments)

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    task, safety = read_rows(given.task), read_rows(given.safety)
    held = batch_of(safety, tokenizer)  # few enough to be looked at in every step
    with torch.no_grad():
        before = losses(model, held)

    limit = hf.ChanceConstraint(tau=0.1, alpha=0.05, unit="nll_token")
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate)
    safe = hf.SafetyFilter(optimizer)
    events: Counter[str] = Counter()
    for step in range(given.steps):
        start = step * given.batch % len(task)
        optimizer.zero_grad()
        losses(model, batch_of(task[start : start + given.batch], tokenizer)).mean().backward()
        g = limit.value(losses(model, held) - before)
        events[safe.step(g).name] += 1
    with torch.no_grad():
        after = losses(model, held)
    print(f"steps by what the filter did: {', '.join(f'{name} {n}' for name, n in events.items())}")
    print(f"refusals that lost more than {limit.tau} nats per token: {limit.violation_rate(after - before):.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
