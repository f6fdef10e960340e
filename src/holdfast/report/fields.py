"""Stored JSON objects whose fields are checked as they are read: a damaged file is named, never drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from holdfast.core.errors import CheckpointError


class Fields:
    """A JSON object and where it lies; every accessor raises `CheckpointError` naming the place.

    null stands for a number that was not finite, as in events.jsonl.
    """

    def __init__(self, value: Any, where: str) -> None:
        self.where = where
        if not isinstance(value, Mapping):
            self._refuse("is not an object")
        self.value: Mapping[str, Any] = value

    def __contains__(self, key: str) -> bool:
        return self.value.get(key) is not None

    def _refuse(self, fault: str) -> NoReturn:
        raise CheckpointError(
            f"{self.where} {fault}",
            remedy="the file is damaged: restore it, or make it again with the command that wrote it",
        )

    def _get(self, key: str) -> Any:
        if key not in self.value:
            self._refuse(f"has no {key!r}")
        return self.value[key]

    def number(self, key: str, *, default: float | None = None) -> float:
        """A number; null is NaN."""
        found = self.value.get(key) if default is not None else self._get(key)
        if found is None:
            return math.nan if default is None else default
        if isinstance(found, bool) or not isinstance(found, int | float):
            self._refuse(f"has {key!r} of type {type(found).__name__}; expected a number")
        return float(found)

    def share(self, key: str) -> float:
        """A finite number from 0 to 1."""
        found = self.number(key)
        if not 0 <= found <= 1:
            self._refuse(f"has {key!r} = {found:g}; expected a share from 0 to 1")
        return found

    def count(self, key: str) -> int:
        """A whole number, 0 or more; stored as 12 or 12.0."""
        found = self.number(key)
        if not (math.isfinite(found) and found == int(found) and found >= 0):
            self._refuse(f"has {key!r} = {found:g}; expected a count")
        return int(found)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        found = self._get(key) if default is None else self.value.get(key)
        if found is None and default is not None:
            return default
        if not isinstance(found, str):
            self._refuse(f"has {key!r} of type {type(found).__name__}; expected text")
        return found

    def flag(self, key: str) -> bool:
        """True or false."""
        found = self._get(key)
        if not isinstance(found, bool):
            self._refuse(f"has {key!r} of type {type(found).__name__}; expected true or false")
        return found

    def texts(self, key: str) -> list[str]:
        """A list of strings; empty where absent."""
        found = self.value.get(key) or []
        if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
            self._refuse(f"has {key!r} that is not a list of text")
        return list(found)

    def inner(self, key: str) -> Fields:
        """The object under `key`."""
        return Fields(self._get(key), f"{self.where}, {key}:")

    def objects(self, key: str) -> dict[str, Fields]:
        """The objects under the names of the object `key`; null ones left out, none where `key` is absent."""
        if key not in self:
            return {}
        inner = self.inner(key)
        return {str(name): inner.inner(name) for name in inner.value if name in inner}
