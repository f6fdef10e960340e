"""What is wrong with a run file, in our words: one `Problem` a key, all of them in one error."""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from holdfast.core.errors import ConfigError
from holdfast.core.registry import nearest
from holdfast.records.run_record import SINGLE
from holdfast.runs.config import schema
from holdfast.runs.config.blocks import SafetyBlock, number

WORDS: dict[Any, str] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list", tuple: "a list",
    dict: "a mapping", types.NoneType: "null",
}  # fmt: skip
ELSEWHERE = {
    "train.screening": "it is called `train.skip_inactive_rows` now; `screening:` at the top is about asking the model",
    "monitor.rollback": "set `train.rollback`",
    "trust_remote_code": "only `--trust-remote-code` on the command line allows it",
    "filter": "its options are written with the defense now: {name: holdfast, space: update, rate: 0.3}",
}
"""Keys that one may look for in the wrong place, or under an old name."""


class Problem(NamedTuple):
    """One key of the file that cannot stand."""

    key: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key}: {self.what} ({self.remedy})"


def raise_problems(problems: Sequence[Problem], where: str) -> None:
    """Raise one `ConfigError` that lists every problem; nothing when there are none."""
    if len(problems) == 1:
        only = problems[0]
        raise ConfigError(f"{where}: {only.key}: {only.what}", remedy=only.remedy)
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(f"{where}: {len(problems)} problems{lines}", remedy="correct these keys")


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= 40):
        return str(value).lower() if isinstance(value, bool) else repr(value)
    return next((word for kind, word in WORDS.items() if isinstance(value, kind)), "a value")


def _expectation(hint: Any) -> str:
    """A type annotation in words: `float | None` is "a number or null"."""
    if hint in WORDS:
        return WORDS[hint]
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_expectation(part) for part in typing.get_args(hint)))
    if origin is typing.Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(str(member.value) for member in hint)
    return WORDS.get(origin, "another kind of value")


def _mismatch(key: str, expected: str, value: object) -> Problem:
    remedy = f"set {key} to {expected}"
    if isinstance(value, bool) and "text" in expected:
        remedy = "YAML reads yes, no, on and off as true or false: put it in quotes"
    return Problem(key, f"expected {expected}, found {_kind(value)}", remedy)


def _unknown_key(key: str, name: str, known: list[str]) -> Problem:
    return Problem(key, "unknown key", ELSEWHERE.get(key) or ELSEWHERE.get(name) or nearest(name, known))


# -- blocks that mirror dataclasses


def field_names(cls: Any) -> list[str]:
    """Names that the constructor of a dataclass accepts."""
    return [field.name for field in dataclasses.fields(cls) if field.init]


def check_fields(
    values: Mapping[Any, Any], cls: Any, where: str, refused: Mapping[str, str] | None = None,
    choices: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[dict[str, Any], list[Problem]]:  # fmt: skip
    """The good values as the dataclass wants them, and a `Problem` for each key that is unknown or of the wrong kind.

    `refused`: fields that are set elsewhere, each with the place; `choices`: names that a registry knows for a field.
    """
    refused = refused or {}
    known = [name for name in field_names(cls) if name not in refused]
    hints = typing.get_type_hints(cls) | {name: typing.Literal[names] for name, names in (choices or {}).items()}
    checked: dict[str, Any] = {}
    problems: list[Problem | None] = []
    for name, value in values.items():
        key, problem = f"{where}.{name}", None
        if name in refused:
            problem = Problem(key, "is not set here", refused[name])
        elif name not in known:
            problem = _unknown_key(key, str(name), known)
        else:
            converted, problem = _check_value(key, value, hints[name])
            checked |= {name: converted} if problem is None else {}
        problems.append(problem)
    return checked, [problem for problem in problems if problem is not None]


def check_block(values: Mapping[Any, Any], cls: Any, key: str) -> tuple[dict[str, Any], list[Problem]]:
    """`check_fields`, and what the class itself refuses: it knows the valid ranges."""
    checked, problems = check_fields(values, cls, key)
    try:
        cls(**checked)
    except ConfigError as error:
        problems.append(Problem(key, error.what.removeprefix(f"{key.rpartition('.')[2]}: "), error.remedy))
    return checked, problems


def _check_value(key: str, value: Any, hint: Any) -> tuple[Any, Problem | None]:
    expected = _expectation(hint)
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
        wrong = isinstance(value, float) and math.isnan(value)
    except ValidationError:
        wrong = True
    return value, _mismatch(key, expected, value) if wrong else None


# -- blocks that are pydantic models

_EXPECTED = {
    "float_type": "a number", "float_parsing": "a number", "finite_number": "a finite number",
    "int_type": "a whole number", "int_from_float": "a whole number", "bool_type": "true or false",
    "string_type": "text", "dict_type": "a mapping", "model_type": "a mapping", "model_attributes_type": "a mapping",
    "list_type": "a list", "tuple_type": "a list", "string_too_short": "text that is not empty",
    "too_short": "at least one entry", "string_pattern_mismatch": "a name of letters, digits, '_' and '-'",
}  # fmt: skip
_BOUNDS = {
    "greater_than": "a number above", "greater_than_equal": "a number of at least", "less_than": "a number below",
    "less_than_equal": "a number of at most",
}  # fmt: skip
BlockAt = Callable[[list[str]], type[BaseModel]]
_BLOCKS: dict[str, type[BaseModel]] = {
    "task": schema.TaskBlock, "lora": schema.LoraBlock, "safety": SafetyBlock, "roles": schema.RolesBlock,
    "harmful": schema.HarmfulBlock, "screening": schema.ScreeningBlock, "monitor": schema.MonitorBlock,
}  # fmt: skip


def from_pydantic(error: ValidationError, single: bool = False, block_at: BlockAt | None = None) -> list[Problem]:
    """Every finding of pydantic as a `Problem`; `block_at` finds the block in which the last key of a place stands."""
    return [_problem(details, single, block_at) for details in error.errors(include_url=False)]


def _problem(details: ErrorDetails, single: bool, block_at: BlockAt | None) -> Problem:
    location = [str(part) for part in details["loc"] if part != "[key]"]
    block = block_at(location) if block_at else _BLOCKS.get(location[0] if location[1:] else "", schema.RunConfig)
    if single and location[:2] == ["safety", SINGLE]:
        del location[1]
    key, name, type_ = ".".join(location) or "safety", location[-1] if location else "safety", details["type"]
    context = details.get("ctx", {})
    if type_ == "extra_forbidden":
        return _unknown_key(key, name, list(block.model_fields))
    if type_ == "missing":
        return Problem(key, "missing", f"add `{name}:`")
    if type_ == "value_error":
        return Problem(key, str(context["error"]), f"change {key}")
    if type_ == "literal_error":
        expected = f"one of {context['expected']}"
    elif type_ in _BOUNDS:
        expected = f"{_BOUNDS[type_]} {next(iter(context.values()))}"
    else:
        expected = _EXPECTED.get(type_, details["msg"].lower())
    return _mismatch(key, expected, details["input"])
