"""Tools in conversations: kept as JSON text in the turns, spelled out where a template renders them.

| where                              | key          | what                                                      |
|------------------------------------|--------------|-----------------------------------------------------------|
| the first turn of the conversation | `tools`      | the descriptions of the tools, from the column `tools`    |
| a turn of the assistant            | `tool_calls` | the calls that it makes                                   |

So all values of a turn are strings, an example's id covers them, and they go wherever its prompt goes.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.core.errors import DataError

TOOLS, CALLS = "tools", "tool_calls"
NAMES = ("name", "tool_call_id")  # of a turn with a tool's result


def as_text(value: Any) -> str | None:
    """A list of objects, or JSON text of one, as JSON text; None for an empty one.

    A `ValueError` for anything else. The order of keys is kept, since templates print it.
    """
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, Sequence) or not all(isinstance(item, Mapping) for item in found):
        raise ValueError
    return json.dumps(list(found), ensure_ascii=False) if found else None


def has_tools(turns: Sequence[Mapping[str, str]]) -> bool:
    """Whether a conversation has tools, or calls one."""
    return any(TOOLS in turn or CALLS in turn for turn in turns)


def tools_of(turns: Sequence[Mapping[str, str]]) -> Any:
    """The tools of a conversation, as templates take them; None where it has none."""
    return next((json.loads(turn[TOOLS]) for turn in turns[:1] if TOOLS in turn), None)


def spelled_out(turns: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """The turns as templates and TRL take them: calls as lists, and no tools."""
    found: list[dict[str, Any]] = []
    for turn in turns:
        own: dict[str, Any] = {name: value for name, value in turn.items() if name != TOOLS}
        found.append({**own, CALLS: json.loads(own[CALLS])} if CALLS in own else own)
    return found


def require_tool_template(template: Any, turns: Sequence[Mapping[str, str]], name: str) -> None:
    """Refuse a template that would leave tools or calls out without a word."""
    for key in (TOOLS, CALLS):
        if any(key in turn for turn in turns) and key not in str(template):
            raise DataError(
                f"a conversation has {key}, and the chat template of {name} does not render them",
                remedy="use a model whose template knows tools, or leave these rows out",
            )
