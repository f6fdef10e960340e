"""What is wrong with a run file, in our words: one `Problem` a key, all of them in one error."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from holdfast.config.asking import MonitorBlock, ScreeningBlock
from holdfast.config.safety_sets import SafetyBlock
from holdfast.config.schema import HarmfulBlock, LoraBlock, RolesBlock, RunConfig, TaskBlock
from holdfast.core.errors import ConfigError
from holdfast.core.registry import nearest
from holdfast.records.run_record import SINGLE

WORDS: dict[Any, str] = {
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
    types.NoneType: "null",
}
FROM_COMMAND_LINE = {"trust_remote_code": "only `--trust-remote-code` on the command line allows it"}
ELSEWHERE = {
    "train.screening": "it is called `train.skip_inactive_rows` now; `screening:` at the top is about asking the model",
    "monitor.rollback": "set `train.rollback`",
}
"""Keys that one may look for in the wrong place, or under an old name."""


@dataclass(frozen=True)
class Problem:
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


def kind(value: Any) -> str:
    """A value in words, short: its kind, and what it is when that is short and plain."""
    if value is None:
        return "nothing"
    word = next((WORDS[c] for c in (bool, int, float, str, list, tuple, dict) if isinstance(value, c)), "a value")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float) or (isinstance(value, str) and len(value) <= 40):
        return f"{value!r}"
    return word


def expectation(hint: Any) -> str:
    """A type annotation in words: `float | None` is "a number or null"."""
    if hint in WORDS:
        return WORDS[hint]
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(expectation(part) for part in typing.get_args(hint)))
    if origin is typing.Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(str(member.value) for member in hint)
    return WORDS.get(origin, "another kind of value")


def mismatch(key: str, expected: str, value: Any) -> Problem:
    """A value of the wrong kind, with the advice that the confusion most likely needs."""
    remedy = f"set {key} to {expected}"
    if isinstance(value, bool) and "text" in expected:
        remedy = "YAML reads yes, no, on and off as true or false: put it in quotes"
    return Problem(key, f"expected {expected}, found {kind(value)}", remedy)


def unknown_key(key: str, name: str, known: list[str]) -> Problem:
    """A key that does not exist, with the nearest that does."""
    return Problem(key, "unknown key", ELSEWHERE.get(key) or FROM_COMMAND_LINE.get(name) or nearest(name, known))


def from_pydantic(
    error: ValidationError,
    single_safety: bool = False,
    block_at: Callable[[list[str]], type[BaseModel]] | None = None,
) -> list[Problem]:
    """Every finding of pydantic as a `Problem`; `block_at` finds the block of a key (default: in a run file)."""
    return [_problem(details, single_safety, block_at or _block) for details in error.errors(include_url=False)]


_EXPECTED = {
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "list_type": "a list",
    "tuple_type": "a list",
    "string_too_short": "text that is not empty",
    "too_short": "at least one entry",
}
_BOUNDS = {
    "greater_than": "a number above",
    "greater_than_equal": "a number of at least",
    "less_than": "a number below",
    "less_than_equal": "a number of at most",
}


def _problem(details: ErrorDetails, single_safety: bool, block_at: Callable[[list[str]], type[BaseModel]]) -> Problem:
    location = [str(part) for part in details["loc"] if part != "[key]"]
    block = block_at(location)
    if single_safety and location[:2] == ["safety", SINGLE]:
        del location[1]
    key, name, type_ = ".".join(location) or "safety", location[-1] if location else "safety", details["type"]
    if type_ == "extra_forbidden":
        return unknown_key(key, name, list(block.model_fields))
    if type_ == "missing":
        return Problem(key, "missing", f"add `{name}:`")
    if type_ == "value_error":
        return Problem(key, str(details["ctx"]["error"]), f"change {key}")
    return mismatch(key, _expected(type_, details), details["input"])


def _block(location: Sequence[str]) -> type[BaseModel]:
    """The block in which the last key of a location stands."""
    if len(location) <= 1:
        return RunConfig
    blocks: dict[str, type[BaseModel]] = {
        "task": TaskBlock, "lora": LoraBlock, "safety": SafetyBlock, "roles": RolesBlock, "harmful": HarmfulBlock,
        "screening": ScreeningBlock, "monitor": MonitorBlock,
    }  # fmt: skip
    return blocks.get(location[0], RunConfig)


def _expected(type_: str, details: ErrorDetails) -> str:
    context = details.get("ctx", {})
    if type_ == "literal_error":
        return f"one of {context['expected']}"
    if type_ == "string_pattern_mismatch":
        return "a name of letters, digits, '_' and '-'"
    if type_ in _BOUNDS:
        return f"{_BOUNDS[type_]} {next(iter(context.values()))}"
    return _EXPECTED.get(type_, details["msg"].lower())
