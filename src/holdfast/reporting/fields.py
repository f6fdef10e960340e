"""Stored JSON objects whose fields are checked as they are read: a damaged file is named, never drawn."""

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from holdfast.core.errors import CheckpointError


class Fields:
    """A JSON object and where it lies; every accessor raises `CheckpointError` naming the place.

    null stands for a number that was not finite; a field that is null is not `in` the object.
    """

    def __init__(self, value: Any, where: str) -> None:
        self.where = where
        if not isinstance(value, Mapping):
            self._refuse("is not an object")
        self.value: Mapping[str, Any] = value

    def __contains__(self, key: str) -> bool:
        return self.value.get(key) is not None

    def _refuse(self, fault: str) -> NoReturn:
        remedy = "the file is damaged: restore it, or make it again with the command that wrote it"
        raise CheckpointError(f"{self.where} {fault}", remedy=remedy)

    def _get(self, key: str, kinds: type | tuple[type, ...] = object, expected: str = "") -> Any:
        if key not in self.value:
            self._refuse(f"has no {key!r}")
        value = self.value[key]
        if not isinstance(value, kinds) or (kinds == (int, float) and isinstance(value, bool)):
            self._refuse(f"has {key!r} of type {type(value).__name__}; expected {expected}")
        return value

    def number(self, key: str, *, optional: bool = False) -> float:
        """A number; NaN for null, and where an optional one is absent."""
        if key not in self and (optional or key in self.value):
            return math.nan
        return float(self._get(key, (int, float), "a number"))

    def share(self, key: str) -> float:
        """A finite number from 0 to 1."""
        value = self.number(key)
        if not 0 <= value <= 1:
            self._refuse(f"has {key!r} = {value:g}; expected a share from 0 to 1")
        return value

    def count(self, key: str) -> int:
        """A whole number, 0 or more; stored as 12 or 12.0."""
        value = self.number(key)
        if not (math.isfinite(value) and value == int(value) and value >= 0):
            self._refuse(f"has {key!r} = {value:g}; expected a count")
        return int(value)

    def text(self, key: str, default: str | None = None) -> str:
        if default is not None and key not in self:
            return default
        return str(self._get(key, str, "text"))

    def inner(self, key: str) -> "Fields":
        return Fields(self._get(key), f"{self.where}, {key}:")

    def objects(self, key: str) -> dict[str, "Fields"]:
        """The objects under the names of the object `key`; null ones left out, none where `key` is absent."""
        if key not in self:
            return {}
        inner = self.inner(key)
        return {str(name): inner.inner(name) for name in inner.value if name in inner}
