"""docs/run-file-keys.md is what the schema says."""

from __future__ import annotations

import json
import re
from dataclasses import fields

import pytest
from tools.run_file_page import PAGE, kinds, page
from trl import SFTConfig

from holdfast.constraint.chance import ChanceConstraint
from holdfast.runs.config.load import OWNED
from holdfast.runs.config.schema import shipped_schema
from holdfast.training.config import SafeSFTConfig


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == page(json.loads(shipped_schema())), "python -m tools.run_file_page"


def test_every_key_has_a_text():
    keys = [" ".join(entry.split()) for entry in re.findall(r"^\* (`.*(?:\n  .*)*)", PAGE.read_text("utf-8"), re.M)]
    assert len(keys) > 90
    assert [key for key in keys if not re.search(r"\): \S+ \S+", key)] == []


def test_the_page_has_the_keys_of_a_constraint_and_our_own_of_train():
    text = PAGE.read_text(encoding="utf-8")
    ours = {field.name for field in fields(SafeSFTConfig)} - {field.name for field in fields(SFTConfig)}
    for heading, expected in (("constraint", {field.name for field in fields(ChanceConstraint)}), ("train", ours)):
        section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        assert set(re.findall(r"^\* `(\w+)`", section, re.M)) == expected - set(OWNED), heading


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"type": "integer", "minimum": 1}, ["whole number >= 1"]),
        ({"anyOf": [{"$ref": "#/definitions/LoraBlock"}, {"type": "null"}]}, ["[lora](#lora)", "null"]),
        ({"enum": ["refuse", 4]}, ["`refuse`", "`4`"]),
        ({"type": "array", "items": {"type": "string"}}, ["list of text"]),
        ({"type": "object", "additionalProperties": {"type": "number"}}, ["names, each with number"]),
        ({"anyOf": [{"type": "number"}, {"pattern": "^[-+]?[0-9.]+[eE][-+]?[0-9]+$", "type": "string"}]}, ["number"]),
    ],
)
def test_kinds_in_words(value, words):
    assert list(kinds(value)) == words
