"""The JSON Schema of run files: as shipped, what `check` accepts and refuses by name, an editor does too."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from tools.run_file_schema import schema_text

from holdfast.runs.config.schema import shipped_schema

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads(shipped_schema())
SMALLEST = {"model": "owner/name", "task": "task.jsonl", "output_dir": "out"}


def problems(values: object) -> list[str]:
    return [error.message for error in jsonschema.Draft7Validator(SCHEMA).iter_errors(values)]


def run_files() -> list[tuple[str, str]]:
    """Every run file in the documents."""
    found = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in re.findall(r"^```yaml\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.M | re.S):
            values = yaml.safe_load(block)
            if isinstance(values, dict) and {"model", "task", "output_dir"} <= set(values):
                found.append((path.name, block))
    return found


def test_the_shipped_file_is_what_the_classes_say():
    assert shipped_schema() == schema_text(), "run `python -m tools.run_file_schema`"
    jsonschema.Draft7Validator.check_schema(SCHEMA)


def test_every_run_file_of_the_documents_is_valid():
    files = run_files()
    assert len(files) > 3
    assert [(name, found) for name, block in files if (found := problems(yaml.safe_load(block)))] == []


@pytest.mark.parametrize(
    "change",
    [
        {"safety": "auto"},
        {"safety": {"data": "safety.jsonl"}},
        {"safety": {"mine": {"data": "a.jsonl"}, "own": {"prompts": ["task"], "keep": "refusals"}}},
        {"constraint": {"mine": {"tau": 0.1}}},
        {"defense": {"name": "kl", "preset": "paper"}},
        {"train": {"learning_rate": "1e-4", "save_strategy": "steps"}},
        {"lora": None},
    ],
    ids=str,
)
def test_short_and_long_forms(change):
    assert problems(SMALLEST | change) == []


@pytest.mark.parametrize(
    "change",
    [
        {"modle": "x"},
        {"defense": "holdfsat"},
        {"defense": {"name": "holdfast", "trust_regoin": 3}},
        {"train": {"learning_rat": 1e-4}},
        {"train": {"output_dir": "x"}},
        {"constraint": {"taw": 0.1}},
        {"lora": {"r": 0}},
        {"monitor": {"every": "often"}},
        {"seed": "one"},
    ],
    ids=str,
)
def test_mistakes_are_underlined(change):
    assert problems(SMALLEST | change)


@pytest.mark.parametrize("key", sorted(SMALLEST))
def test_what_a_file_must_have(key):
    assert problems({name: value for name, value in SMALLEST.items() if name != key})


def test_keys_say_what_they_mean():
    assert "set aside" in SCHEMA["properties"]["conflicts"]["description"]
    assert "Safety examples per optimizer step" in SCHEMA["properties"]["train"]["properties"]["safety_batch_size"][
        "description"
    ]  # fmt: skip
