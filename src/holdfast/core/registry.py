"""Names to objects for what users pick by name (defenses, majorizers, tasks, judges, ...), and their options.

An unknown name raises with the nearest match, and a name cannot be taken twice. On first use a registry imports the
modules of its own package, and what other distributions offer under the entry point group `holdfast.<kind>s`, with
underscores for spaces (a module that registers itself, or a package of such modules); so that adding an entry means
adding one file, here or elsewhere.
"""

import difflib
import importlib
import inspect
import json
import math
import pkgutil
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from holdfast.core.errors import ConfigError

T = TypeVar("T")


def nearest(name: str, known: list[str]) -> str:
    """`", did you mean 'x'?"` when a known name is close to `name`, otherwise the list of known names."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"


def require_number(
    who: str, option: str, value: object, least: float, kind: Any = int, *, expected: str = "a number"
) -> None:
    """Refuse an option that is not a finite number of this kind, or below `least`."""
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < math.inf:
        raise ConfigError(f"{who}: {option} {value!r}, expected {expected} >= {least:g}", remedy=f"leave out {option}")


def written_options(what: str, written: str, example: str) -> dict[str, Any]:
    """`option=value,option=value` as a mapping; values are read as JSON, else as text. `example` is of the remedy."""
    options: dict[str, Any] = {}
    for pair in written.split(","):
        key, equals, value = pair.partition("=")
        key = key.strip()
        if not (key and equals) or key in options:
            expected = f"{what}: expected NAME:option=value,option=value with each option once"
            raise ConfigError(expected, remedy=f"for example {example}")
        options[key] = value
        with suppress(ValueError):
            options[key] = json.loads(value)
    return options


def _import_modules(package: ModuleType) -> None:
    for module in pkgutil.iter_modules(getattr(package, "__path__", ())):
        if not module.name.startswith("_"):
            importlib.import_module(f"{package.__name__}.{module.name}")


class Registry(Generic[T]):
    """A name -> entry table; on first use the modules of `package` are imported, which register themselves."""

    def __init__(self, kind: str, package: str | None = None) -> None:
        self.kind, self._package, self._scanned = kind, package, False
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that enters an object under `name`."""

        def enter(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is already registered")
            self._entries[name] = entry
            return entry

        return enter

    def _all(self) -> dict[str, T]:
        if not self._scanned:
            self._scanned = True  # before the imports: a module may ask the registry that it registers with
            if self._package is not None:
                _import_modules(importlib.import_module(self._package))
            for entry_point in entry_points(group=f"holdfast.{self.kind.replace(' ', '_')}s"):
                _import_modules(entry_point.load())
        return self._entries

    def __getitem__(self, name: str) -> T:
        if name not in self._all():
            raise ConfigError(f"unknown {self.kind} {name!r}", remedy=nearest(name, list(self._entries)))
        return self._entries[name]

    def require_options(
        self, name: str, options: Collection[str], *, given: Collection[str] = (), prefix: str = ""
    ) -> None:
        """Refuse options that an entry's signature does not have, and those that it lacks.

        `given` are all entries'; `prefix` is how users write an option's beginning.
        """
        parameters = inspect.signature(cast("Callable[..., Any]", self[name])).parameters
        taken = {key: parameter for key, parameter in parameters.items() if key not in given}
        for option in options:
            if option not in taken:
                remedy = nearest(option, list(taken)) if taken else "it takes no options"
                raise ConfigError(f"{self.kind} {name!r} has no option {option!r}", remedy=remedy)
        if missing := [key for key, p in taken.items() if p.default is p.empty and key not in options]:
            remedy = f"write {prefix}{','.join(f'{key}=...' for key in missing)}"
            raise ConfigError(f"{self.kind} {name!r} needs {', '.join(missing)}", remedy=remedy)

    def __contains__(self, name: object) -> bool:
        return name in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._all()))

    def items(self) -> list[tuple[str, T]]:
        return sorted(self._all().items(), key=lambda item: item[0])
