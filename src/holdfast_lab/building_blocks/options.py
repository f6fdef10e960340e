"""A baseline's options: each with its default, its meaning (printed on the defense's page) and its range."""

import math
import operator
from dataclasses import dataclass, field, fields
from typing import TypeVar

from holdfast.core.errors import ConfigError

T = TypeVar("T")
BOUNDS = {
    "least": (operator.ge, "at least"), "above": (operator.gt, "more than"), "most": (operator.le, "at most"),
    "below": (operator.lt, "less than"),
}  # fmt: skip


def option(default: T, meaning: str, *, choices: tuple[str, ...] = (), remedy: str = "", **bounds: float) -> T:
    """A field of `Options`: one of the `choices`, or a finite number within `bounds`, whose names `BOUNDS` has."""
    usual = "leave it out" if default is None else f"the authors use {default}"
    given = remedy or (f"use {' or '.join(choices)}" if choices else usual)
    about = {"meaning": meaning, "remedy": given, "choices": choices, "bounds": bounds}
    made: T = field(default=default, metadata=about)
    return made


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of a baseline's `Config`: refuses values out of an option's range; None stands for no value."""

    @property
    def defense(self) -> str:
        """Whose options these are: one defense is one file."""
        return type(self).__module__.rpartition(".")[2]

    def __post_init__(self) -> None:
        for one in fields(self):
            value, choices, bounds = getattr(self, one.name), one.metadata["choices"], one.metadata["bounds"]
            if choices:
                fits, expected = value in choices, " or ".join(choices)
            elif value is None or not bounds:
                continue
            else:
                held = [BOUNDS[name][0](value, bound) for name, bound in bounds.items()]
                fits = math.isfinite(value) and all(held)
                expected = " and ".join(f"{BOUNDS[name][1]} {bound:g}" for name, bound in bounds.items())
            if not fits:
                what = f"{self.defense}: {one.name} is {value!r}, expected {expected}"
                raise ConfigError(what, remedy=one.metadata["remedy"])
