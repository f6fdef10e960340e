"""docs/run-file-keys.md is what the schema says."""

from __future__ import annotations

import json

import pytest
from tools.run_file_page import PAGE, kinds, page

from holdfast.runs.config.schema import shipped_schema


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == page(json.loads(shipped_schema())), "python -m tools.run_file_page"


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
