"""Mutated files: bits, ends and fields, by a seed."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.attacks.forging import sealed


def damaged(whole: bytes, draw: random.Random) -> bytes:
    """A file with a flipped bit, a cut end, a blank stretch, or two stretches exchanged; never the file itself."""
    while True:
        data, at, length = bytearray(whole), draw.randrange(len(whole)), draw.randrange(1, 40)
        way = draw.choice(("flip", "cut", "blank", "swap"))
        if way == "flip":
            data[at] ^= 1 << draw.randrange(8)
        elif way == "cut":
            del data[at:]
        elif way == "blank":
            data[at : at + length] = bytes(len(data[at : at + length]))
        else:
            to = draw.randrange(len(whole))
            data[at : at + length], data[to : to + length] = data[to : to + length], data[at : at + length]
        if bytes(data) != whole:
            return bytes(data)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values that are neither object nor list."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inner is None:
        return [path]
    return [leaf for key, found in inner for leaf in leaves(found, (*path, key))]


def other_value(value: Any, draw: random.Random) -> Any:
    """Another value: of the same type, or of another one."""
    if draw.random() < 0.2:
        return draw.choice([None, True, "x", -1, 1e300, [], {}, [value], {"x": value}])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return draw.choice([value + 1, -value - 1, value * 0.9 + 0.01, value + 1e-6, 0 if value else 1])
    if isinstance(value, str):
        return draw.choice([value + "x", value[1:], value[::-1] + "y", "../" + value, ""]) if value else "x"
    return draw.choice([0, "x", False])


def edited(values: dict[str, Any], draw: random.Random, seal: str) -> tuple[str, dict[str, Any]]:
    """The object with one value changed, dropped, or exchanged with another; and the key it stands under."""
    while True:
        changed = json.loads(json.dumps(values))
        places = [leaf for leaf in leaves(changed) if leaf and leaf[0] != seal]
        path = draw.choice(places)
        holder = at(changed, path[:-1])
        way = draw.random()
        if way < 0.1 and isinstance(holder, dict):
            del holder[path[-1]]
        elif way < 0.3:
            other = draw.choice(places)
            target = at(changed, other[:-1])
            holder[path[-1]], target[other[-1]] = target[other[-1]], holder[path[-1]]
        else:
            holder[path[-1]] = other_value(holder[path[-1]], draw)
        if changed != values or json.dumps(changed) != json.dumps(values):
            return str(path[0]), sealed(changed, seal)


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value
