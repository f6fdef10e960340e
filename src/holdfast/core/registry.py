"""Names to objects for the four kinds that users pick by name: defenses, majorizers, tasks, judges.

An unknown name raises with the nearest match (it never falls through to a default), and a name cannot be
taken twice. A registry may be given a package whose modules it imports on first use, so that adding an
entry means adding one file.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from holdfast.core.errors import ConfigError

T = TypeVar("T")


def nearest(name: str, known: list[str]) -> str:
    """`", did you mean 'x'?"` when a known name is close to `name`, otherwise the list of known names."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"


class Registry(Generic[T]):
    """A name -> entry table for one kind of thing."""

    def __init__(self, kind: str, package: str | None = None) -> None:
        self.kind = kind
        self._package = package
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that enters an object under `name`."""

        def enter(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is already registered")
            self._entries[name] = entry
            return entry

        return enter

    def _scan(self) -> None:
        if self._package is None:
            return
        package = importlib.import_module(self._package)
        self._package = None
        for module in pkgutil.iter_modules(package.__path__):
            if not module.name.startswith("_"):
                importlib.import_module(f"{package.__name__}.{module.name}")

    def __getitem__(self, name: str) -> T:
        self._scan()
        if name not in self._entries:
            raise ConfigError(f"unknown {self.kind} {name!r}", remedy=nearest(name, list(self._entries)))
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        self._scan()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._scan()
        return iter(sorted(self._entries))

    def items(self) -> list[tuple[str, T]]:
        """Entries in alphabetical order."""
        return [(name, self._entries[name]) for name in self]
