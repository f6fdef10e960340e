"""Reading YAML strictly: plain data only, every key once, a size and depth that cannot hurt.

A run file may come from somebody else, so nothing in it can run code (only `yaml.SafeLoader` builds values,
and any explicit tag is refused before), expand (aliases are refused) or hide (duplicate keys are refused).
"""

from pathlib import Path
from typing import Any

import yaml

from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.core.registry import nearest

MAX_BYTES = 1_000_000
MAX_DEPTH = 32


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; what is not plain, unambiguous data is a `ConfigError` with its line."""
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path()
        names = [entry.name for entry in folder.iterdir() if entry.suffix in {".yaml", ".yml"}]
        remedy = nearest(path.name, names) if names else "give the path of a run file in YAML"
        fault = "a folder, expected a run file" if path.is_dir() else "no such file"
        raise ConfigError(f"{path}: {fault}", remedy=remedy)
    if (size := path.stat().st_size) > MAX_BYTES:
        what = f"{path}: {size} bytes, expected at most {MAX_BYTES}"
        raise ConfigError(what, remedy="data belongs in the files it names")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}", remedy="save the file as UTF-8 text") from error
    value = parse_yaml(text, str(path))
    if not isinstance(value, dict):
        what = f"{path}: expected `key: value` lines, found {'nothing' if value is None else 'something else'}"
        raise ConfigError(what, remedy="start with `model:`, `task:` and `safety:`")
    return value


def parse_yaml(text: str, where: str) -> Any:
    """The value of YAML text; `where` names it in errors."""
    try:
        loader = _PlainLoader(text)
        loader.where = where
        root = loader.get_single_node()
        _refuse_duplicate_keys(root, where)
        return None if root is None else loader.construct_document(root)
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        tab = "'\\t'" in str(getattr(error, "problem", ""))
        remedy = "indent with spaces, not tabs" if tab else "check indentation, colons and quotes there"
        raise ConfigError(f"{where}: {_reason(error)}", remedy=remedy) from error
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        # A date such as 2020-13-45, `0b`, or a number of 5,000 digits: the constructors raise whatever Python does.
        what = f"{where}: a value cannot be read ({type(error).__name__})"
        raise ConfigError(what, remedy="put quotes around it if it is text") from error


def parse_stored_yaml(data: bytes, path: Path) -> dict[str, Any]:
    """The mapping in a YAML file that a command of ours wrote."""
    remedy = "restore the file from a backup"
    try:
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path}: {len(data)} bytes, expected at most {MAX_BYTES}", remedy="")
        value = parse_yaml(data.decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 at byte {error.start}", remedy=remedy) from error
    except ConfigError as error:
        raise CheckpointError(f"the settings cannot be read: {error.what}", remedy=remedy) from error
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise CheckpointError(f"{path} does not hold settings", remedy=remedy)
    return value


class _PlainLoader(yaml.SafeLoader):
    """Refuses aliases, tags and deep nesting on the event stream, before the value or node is built."""

    where, depth = "", 0

    def get_event(self) -> Any:
        event: Any = super().get_event()  # type: ignore[no-untyped-call]
        place = f"{self.where}:{event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(f"{place}: YAML aliases are not allowed", remedy="write the value out")
        if getattr(event, "tag", None) is not None:
            what = f"{place}: YAML tag {event.tag!r} is not allowed"
            raise ConfigError(what, remedy="remove the tag: only plain values")
        self.depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if self.depth > MAX_DEPTH:
            raise ConfigError(f"{place}: nested more than {MAX_DEPTH} deep", remedy="a run file needs four levels")
        return event


def _refuse_duplicate_keys(node: yaml.Node | None, where: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{where}:{line}: a key must be a plain name", remedy="write `name: value`")
            if key.value in seen:
                what = f"{where}:{line}: key {key.value!r} appears twice, first on line {seen[key.value]}"
                raise ConfigError(what, remedy="keep one of the two")
            seen[key.value] = line
            _refuse_duplicate_keys(value, where)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicate_keys(item, where)


def _reason(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    parts = (getattr(error, "context", None), getattr(error, "problem", None))
    problem = ", ".join(part for part in parts if part) or "not readable as YAML"
    return problem if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
