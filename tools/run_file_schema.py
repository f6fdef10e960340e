"""The JSON Schema of run files, made from the classes that check them, for editors.

python -m tools.run_file_schema     rewrites the copy in src/holdfast/runs/config; a test compares them.
Afterwards: python -m tools.run_file_page

`holdfast init` writes that copy beside the run file. What the schema cannot say (settings that exclude one another,
files that must exist) is what `holdfast check` reports.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import textwrap
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, PydanticSchemaGenerationError, TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema
from tools.defense_pages import attributes

from holdfast.runs.config.schema import SHIPPED

_DRAFT = "http://json-schema.org/draft-07/schema#"


def schema_text() -> str:
    """The schema of run files, made from the classes that check them."""
    return json.dumps(run_file_schema(), indent=1, sort_keys=True) + "\n"


def run_file_schema() -> dict[str, Any]:
    """The blocks of `RunConfig`, with the short forms that a file may use and the fields of the mirrored classes."""
    from holdfast.constraint.chance import ChanceConstraint
    from holdfast.runs.config.load import OWNED
    from holdfast.runs.config.schema import RunConfig
    from holdfast.training.config import SafeSFTConfig
    from holdfast.training.hooks import DEFENSES

    schema = _of_model(RunConfig)
    definitions, properties = schema.pop("$defs"), schema["properties"]
    constraint = _of_dataclass(ChanceConstraint)
    safety = {"$ref": "#/definitions/SafetyBlock"}
    options = _shared([_of_dataclass(DEFENSES[key].Config) for key in DEFENSES])
    properties |= {
        "task": {
            "anyOf": [{"type": "string"}, _ref("TaskBlock")],
            "description": "What to learn; a file is short for `{data: FILE}`.",
        },
        "safety": {
            "anyOf": [{"const": "auto"}, safety, {"type": "object", "additionalProperties": safety}],
            "description": "What is held; `auto`, or nothing, is the model's own refusals and answers.",
        },
        "constraint": {
            "anyOf": [
                _object(constraint),
                {"type": "object", "additionalProperties": _object(constraint)},
            ],
            "description": "One limit for every safety set, or one a set by its name.",
        },
        "defense": {
            "anyOf": [
                {"enum": sorted(DEFENSES)},
                _object({"name": {"enum": sorted(DEFENSES)}, "preset": {"const": "paper"}, **options}),
            ],
            "description": "A defense by name, or {name: ..., option: ...}.",
        },
        "train": {
            **_object({k: v for k, v in _of_dataclass(SafeSFTConfig).items() if k not in OWNED}),
            "description": "Fields of SafeSFTConfig, which has all fields of TRL's SFTConfig.",
        },
    }  # fmt: skip
    found = {
        "$schema": _DRAFT, "title": "holdfast run file", "description": "docs/run-file.md explains the keys.",
        **schema, "required": ["model", "task", "output_dir"], "definitions": definitions,
    }  # fmt: skip
    return typing.cast("dict[str, Any]", _moved(found))


def _of_model(cls: type[BaseModel]) -> dict[str, Any]:
    """pydantic's schema, with the docstrings under the fields as their descriptions."""
    schema = cls.model_json_schema(mode="validation")
    blocks = {one.__name__: one for one in _blocks(cls)}
    for name, block in [(None, schema), *schema["$defs"].items()]:
        words = _field_docstrings(cls if name is None else blocks[name])
        for field, found in block["properties"].items():
            if field in words:
                found["description"] = words[field]
            found.pop("title", None)
    return schema


def _blocks(cls: type[BaseModel]) -> list[type[BaseModel]]:
    """Every block class that pydantic knows below the common base of these."""
    base, found = cls.__bases__[0], list[type[BaseModel]]()
    todo = [base]
    while todo:
        found.append(one := todo.pop())
        todo += one.__subclasses__()
    return found


def _field_docstrings(cls: type[BaseModel]) -> dict[str, str]:
    """Field name to the string below it, inherited fields included."""
    found: dict[str, str] = {}
    for one in reversed([c for c in cls.__mro__ if issubclass(c, BaseModel) and c is not BaseModel]):
        body = typing.cast("ast.ClassDef", ast.parse(textwrap.dedent(inspect.getsource(one))).body[0]).body
        for field, below in itertools.pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                found[ast.unparse(field.target)] = " ".join(str(below.value.value).split())
    return found


def _of_dataclass(cls: Any) -> dict[str, Any]:
    """Each field that a file may write: its type, what it means, and its default."""
    hints, meanings = typing.get_type_hints(cls), attributes(cls)
    return {
        field.name: _field(field, hints[field.name], meanings.get(field.name))
        for field in dataclasses.fields(cls)
        if field.init
    }


def _shared(options: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The options of all defenses. What one name means to two of them in two ways is left to their pages."""
    found: dict[str, Any] = {}
    for name, field in ((name, field) for one in options for name, field in one.items()):
        known = found.get(name, field)
        alike = {key: value for key, value in field.items() if known.get(key) == value}
        found[name] = {
            key: value for key, value in field.items() if key in alike or key not in ("description", "default")
        }
    return found


def _field(field: dataclasses.Field[Any], hint: Any, meaning: str | None) -> dict[str, Any]:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
        found = dict(adapter.json_schema())
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema):
        found = {}  # an object of torch or transformers: whatever it is written as
    found = _inlined(found)
    if isinstance(text := field.metadata.get("help", field.metadata.get("meaning", meaning)), str):
        found["description"] = " ".join(text.split())
    if isinstance(field.default, bool | int | float | str):
        found["default"] = field.default
    return found


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """A field's schema without definitions of its own: its enumerations are written where they are used."""
    definitions = schema.pop("$defs", {})

    def put(value: Any) -> Any:
        if isinstance(value, dict):
            ref = str(value.get("$ref", ""))
            return put(definitions[ref.rsplit("/", 1)[1]]) if ref else {k: put(v) for k, v in value.items()}
        return [put(v) for v in value] if isinstance(value, list) else value

    return typing.cast("dict[str, Any]", put(schema))


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "additionalProperties": False}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/definitions/{name}"}


def _moved(value: Any) -> Any:
    """References as draft 7 has them, the draft that editors know best; numbers may be written as `1e-4`."""
    if isinstance(value, Mapping):
        if value.get("type") == "number":  # YAML 1.1 reads 1e-4, which has no dot, as text
            text = {"type": "string", "pattern": r"^[-+]?[0-9.]+[eE][-+]?[0-9]+$"}
            return {"anyOf": [{k: v for k, v in value.items() if k not in ("description", "default")}, text], **{
                k: value[k] for k in ("description", "default") if k in value}}  # fmt: skip
        return {key: _reference(inner) if key == "$ref" else _moved(inner) for key, inner in value.items()}
    return [_moved(inner) for inner in value] if _is_list(value) else value


def _reference(ref: str) -> str:
    return ref.replace("#/$defs/", "#/definitions/")


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


if __name__ == "__main__":
    SHIPPED.write_text(schema_text(), encoding="utf-8")
