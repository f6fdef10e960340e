"""docs/run-file-keys.md: every key of a run file, written from its JSON Schema.

python -m tools.run_file_page     rewrites the page; a test compares them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from textwrap import fill
from typing import Any

from trl import SFTConfig

from holdfast.runs.config.schema import shipped_schema

PAGE = Path(__file__).parent.parent / "docs" / "run-file-keys.md"
HEAD = """\
# Every key of the run file

<!-- Written from the schema by `python -m tools.run_file_page`; do not edit. -->

The keys, their kinds and defaults, as `holdfast check` and an editor read them from
[the schema](../src/holdfast/runs/config/run-file.schema.json). What they mean together, and the defaults of a file of
three lines, are in [The run file](run-file.md). In brackets: what may be written, and the default where it does not
depend on other keys.
"""
CONSTRAINT = """\
The limit of a safety set. The model's own refusals and answers have defaults of their own: [the run
file](run-file.md)."""
TRAIN = """\
holdfast's own fields. All those of TRL's
[`SFTConfig`](https://huggingface.co/docs/trl/sft_trainer#trl.SFTConfig) may be written beside them."""
_WORDS = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false", "null": "null",
          "object": "mapping", "array": "list"}  # fmt: skip
_EXPONENT = "^[-+]?[0-9.]+[eE][-+]?[0-9]+$"  # 1e-4, which YAML reads as text: a number all the same


def kinds(value: Mapping[str, Any]) -> Iterator[str]:
    """What may be written for a key, in words."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        yield f"[{_block(name)}](#{_block(name)})"
    elif "anyOf" in value:
        for one in value["anyOf"]:
            yield from kinds(one)
    elif "enum" in value:
        yield from (f"`{json.dumps(one).strip(chr(34))}`" for one in value["enum"])
    elif "const" in value:
        yield f"`{json.dumps(value['const']).strip(chr(34))}`"
    elif value.get("type") == "array":
        yield f"list of {' or '.join(dict.fromkeys(kinds(value.get('items', {})))) or 'anything'}"
    elif isinstance(inner := value.get("additionalProperties"), Mapping):
        yield f"names, each with {' or '.join(dict.fromkeys(kinds(inner)))}"
    elif value.get("pattern") != _EXPONENT and "type" in value:
        yield _WORDS[value["type"]] + _range(value)


def _range(value: Mapping[str, Any]) -> str:
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    found = [f"{sign} {value[name]}" for name, sign in bounds.items() if name in value]
    return f" {', '.join(found)}" if found else ""


def _block(name: str) -> str:
    return name.removesuffix("Block").lower()


def entries(block: Mapping[str, Any]) -> Iterator[str]:
    """The keys of one block as list items, required ones first."""
    required = set(block.get("required", ()))
    for key, value in sorted(block["properties"].items(), key=lambda item: (item[0] not in required, item[0])):
        written = " | ".join(dict.fromkeys(kinds(value))) or "anything"
        stated = (
            "; required" if key in required else f"; `{json.dumps(value['default'])}`" if "default" in value else ""
        )
        meaning = f": {' '.join(value['description'].split())}" if "description" in value else ""
        yield fill(f"* `{key}` ({written}{stated}){meaning}", 116, subsequent_indent="  ", break_long_words=False,
                   break_on_hyphens=False)  # fmt: skip


def page(schema: Mapping[str, Any]) -> str:
    """The whole page."""
    blocks = schema["definitions"] | _mirrored(schema["properties"])
    limit = {"$ref": "#/definitions/constraint"}
    constraint = schema["properties"]["constraint"] | {
        "anyOf": [limit, {"type": "object", "additionalProperties": limit}]
    }
    train = {"description": schema["properties"]["train"]["description"], "$ref": "#/definitions/train"}
    top = {**schema, "properties": schema["properties"] | {"constraint": constraint, "train": train}}
    parts = [HEAD, "\n".join(["## At the top", "", *entries(top)])]
    for name, block in sorted(blocks.items(), key=lambda item: _block(item[0])):
        parts.append("\n".join([f"## {_block(name)}", "", block.get("description", ""), "", *entries(block)]))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _mirrored(properties: Mapping[str, Any]) -> dict[str, Any]:
    """The blocks that mirror a class: a constraint, and of `train` what TRL does not have."""
    theirs = {field.name for field in fields(SFTConfig)}
    ours = {key: value for key, value in properties["train"]["properties"].items() if key not in theirs}
    return {
        "constraint": properties["constraint"]["anyOf"][0] | {"description": CONSTRAINT},
        "train": {"properties": ours, "description": TRAIN},
    }


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(shipped_schema())), encoding="utf-8")
