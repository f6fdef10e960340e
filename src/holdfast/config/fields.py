"""Checking a block of the run file against the dataclass that it will build."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from holdfast.config.blocks import number
from holdfast.config.problems import Problem, expectation, mismatch, unknown_key


def field_names(cls: Any) -> list[str]:
    """Names that the constructor of a dataclass accepts."""
    return [field.name for field in dataclasses.fields(cls) if field.init]


def defaults(cls: Any) -> dict[str, Any]:
    """The declared default of every field of a dataclass that has one."""
    found = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return found


def check_fields(
    values: Mapping[Any, Any], cls: Any, where: str, refused: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], list[Problem]]:
    """The good values as `cls` wants them, and a `Problem` for each key that is unknown or of the wrong kind.

    Args:
        values: the block as written.
        cls: the dataclass whose fields are meant.
        where: the block's key, for messages.
        refused: fields that exist but are set elsewhere, each with the place.
    """
    known = [name for name in field_names(cls) if name not in (refused or {})]
    hints = typing.get_type_hints(cls)
    checked: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in values.items():
        key = f"{where}.{name}"
        if name in (refused or {}):
            problems.append(Problem(key, "is not set here", (refused or {})[name]))
        elif name not in known:
            problems.append(unknown_key(key, str(name), known))
        else:
            converted, problem = _check_value(key, value, hints[name])
            if problem is None:
                checked[name] = converted
            else:
                problems.append(problem)
    return checked, problems


def _check_value(key: str, value: Any, hint: Any) -> tuple[Any, Problem | None]:
    expected = expectation(hint)
    if isinstance(value, str) and "text" not in expected:
        value = number(value)
    if value is False and "one of no," in expected:
        value = "no"  # YAML 1.1 reads `save_strategy: no` as false
    elif isinstance(value, bool) and "on, off" in expected:
        value = "on" if value else "off"  # and `skip_inactive_rows: on` as true
    adapter: TypeAdapter[Any] = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    try:
        # YAML has lists only, so a tuple may be given as one; everything else must be of its own kind.
        adapter.validate_python(value, strict=not isinstance(value, list))
    except ValidationError:
        return value, mismatch(key, expected, value)
    if isinstance(value, float) and math.isnan(value):
        return value, mismatch(key, expected, value)
    return value, None
