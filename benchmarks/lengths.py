"""Writes how long real rows are: `src/holdfast_lab/bench/lengths.json`, from which `holdfast bench` makes its rows.

Rows are read and prepared as `defense_cost.py` does, with more safe pairs: a task with half of its rows BeaverTails'
unsafe pairs, and BeaverTails' safe pairs, in the chat template of the embedded SmolLM2. Only pairs [prompt tokens,
reply tokens] are written, 500 for each kind: the tasks' own rows, `unsafe` (the poison) and `safe`.

    HOLDFAST_DATA=data python benchmarks/lengths.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.core.files import write_text
from holdfast.data.encode import encode_all
from holdfast.data.examples import Example
from holdfast.data.templates import use_template
from holdfast.models.handle import load_tokenizer
from holdfast.runs.stages.prepare import prepare
from holdfast_lab.bench.settings import TASKS
from holdfast_lab.protocol.roles import RoleSettings, draw_roles

KEPT = 500
ROLES = {
    "safe": "beavertails", "harm_prompts": "beavertails_test", "align": 500, "constraint": None, "monitor": 8,
    "certify": 0, "harmful": 100, "poison": 500, "evaluation": 10, "seed": 42,
}  # fmt: skip
OUTPUT = Path(__file__).parents[1] / "src" / "holdfast" / "bench" / "lengths.json"


def pairs(examples: Sequence[Example], tokenizer: Any) -> list[list[int]]:
    """[prompt tokens, reply tokens] of the first examples, whole."""
    found = encode_all(examples[:KEPT], tokenizer, max_length=None, role="safety").examples
    return [[item.labels.count(-100), len(item.labels) - item.labels.count(-100)] for item in found]


def measured(tokenizer: Any) -> dict[str, list[list[int]]]:
    """The pairs of every kind."""
    shared: dict[str, Any] = {"template": "chat", "seed": 42, "roles": ROLES}
    safety = {"safety": {"role": "constraint", "on_leak": "error"}}
    unsafe = {example.id for example in draw_roles(RoleSettings(**ROLES)).poison}
    found = {}
    for name in TASKS:
        data = prepare({"name": name, "size": 2 * KEPT, "poison_ratio": 0.5}, safety, **shared)
        found[name] = pairs([example for example in data.task if example.id not in unsafe], tokenizer)
        found["unsafe"] = pairs([example for example in data.task if example.id in unsafe], tokenizer)
        found["safe"] = pairs(data.safety["safety"].constraint, tokenizer)
    return found


def as_text(found: dict[str, list[list[int]]]) -> str:
    """JSON with one kind a line."""
    lines = [f'    "{name}": {json.dumps(rows, separators=(",", ":"))}' for name, rows in sorted(found.items())]
    made = "SmolLM2 chat template; [prompt tokens, reply tokens]; benchmarks/lengths.py"
    return f'{{\n  "made": "{made}",\n  "pairs": {{\n' + ",\n".join(lines) + "\n  }\n}\n"


def main() -> None:
    """Read, count, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    tokenizer = load_tokenizer("embedded")
    use_template(tokenizer, "chat")
    found = measured(tokenizer)
    write_text(options.output, as_text(found))
    for name, rows in sorted(found.items()):
        totals = sorted(a + b for a, b in rows)
        print(f"{name:8s} {len(rows)} rows, tokens median {totals[len(totals) // 2]}, longest {totals[-1]}")


if __name__ == "__main__":
    main()
