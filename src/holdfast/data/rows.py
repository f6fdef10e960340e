"""One row of a file or data set to one `Example`, or the reason why not."""

import difflib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.registry import nearest
from holdfast.data.examples import CALLS, TOOLS, Example, Message, Turns, completion_text, make_example, prompt_text

MAX_LISTED = 20
SKIPPED_SHARE = 0.01
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_KEYS, SHAREGPT_ROLES = {"from": "role", "value": "content"}, {"human": "user", "gpt": "assistant"}
NAMES = ("name", "tool_call_id")  # of a turn with a tool's result
FORMATS = (("prompt", "completion"), ("messages",), ("conversations",), ("text",))
CATEGORY = "category"
MAX_CATEGORY = 100  # characters; longer is text, not a label
# What other data sets call a prompt and a completion: shown as a proposal in an error, never applied.
PROPOSALS = {
    "prompt": ("instruction", "question", "query", "input", "goal", "user"),
    "completion": ("output", "answer", "response", "reply", "target", "assistant"),
}
UNSUPPORTED = {
    "chat_template_kwargs": "the safety loss would be taken without it",
    "image": "rows with images cannot be held", "images": "rows with images cannot be held",
}  # fmt: skip
# Names that are printed. Of a table without a header line the "names" are the first example's text.
COLUMN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,29}")


class RowError(ValueError):
    """Why a row is refused; says nothing of its text."""


class MissingColumnsError(RowError):
    """The row has none of the known sets of columns."""


class OtherColumnsError(DataError):
    """A source has other columns than expected: those found (what may be text is only counted) and a mapping."""

    @classmethod
    def of(cls, where: str, found: Iterable[str], columns: Mapping[str, str]) -> "OtherColumnsError":
        columns = _of_format(columns)
        names, listed = _listed_columns(found, columns.values())
        if listed and listed[-1].endswith(("other", "others")):
            listed[-1] += " (is the header line missing?)"
        proposals = []
        for ours in columns or ("prompt", "completion"):
            close = difflib.get_close_matches(columns.get(ours, ours), names, n=1)
            synonyms = [name for name in PROPOSALS.get(ours, ()) if name in names]
            proposals.append(f"{ours}: {(close or synonyms or ['<column>'])[0]}")
        wanted = [name for name in columns.values() if name not in names] or ["prompt", "completion"]
        expected = ", ".join(wanted) if columns else "prompt and completion, messages, conversations, or text"
        named = f"columns: {{{', '.join(proposals)}}}"
        return cls(
            f"{where}: expected columns {expected}; found {', '.join(listed) or 'none'}",
            remedy=f"name the columns to use, for example {named}; in a run file task: {{data: FILE, {named}}}",
        )


class BadRowsError(DataError):
    """Rows of a source are malformed; they are named."""


@dataclass
class Problems:
    """Collects refusals by place, so that one error can list them all, or a report those that were skipped."""

    source: str
    total: int = 0
    listed: list[str] = field(default_factory=list)  # the first 20, each with its place and its reason
    _fatal: bool = False

    def add(self, where: str, reason: str, *, fatal: bool = False) -> None:
        """Note one refusal; the first 20 are kept. After a `fatal` one nothing can be read, so it is no row to skip."""
        self.total += 1
        self._fatal |= fatal
        if len(self.listed) < MAX_LISTED:
            self.listed.append(f"{where}: {reason}")

    def raise_if_any(self) -> None:
        """Raise one `BadRowsError` that lists the refusals."""
        if self.total:
            raise self._error("", "correct or remove the rows named above")

    def require_few(self, kept: int) -> None:
        """Refuse to skip so many rows that the file is in another format rather than damaged.

        Up to 20 may be skipped, since each of them is named, or 1 % of all rows; never as many as are kept.
        """
        if self._fatal:
            words = "; what follows there cannot be read, which is more than a row to skip"
            raise self._error(words, "correct the file")
        allowed = max(MAX_LISTED, int(SKIPPED_SHARE * (kept + self.total)))
        if self.total > allowed or (self.total and self.total >= kept):
            raise self._error(f"; too many to skip (well-formed: {kept})", "correct the file, or check its format")

    def _error(self, words: str, remedy: str) -> BadRowsError:
        more = f"; and {self.total - MAX_LISTED} more" if self.total > MAX_LISTED else ""
        rows = "row" if self.total == 1 else "rows"
        what = f"{self.source}: {self.total} bad {rows}: {'; '.join(self.listed)}{more}{words}"
        return BadRowsError(what, remedy=remedy)


def check_columns(columns: Mapping[str, str] | None) -> dict[str, str]:
    """The full mapping of one format (`{}` means: look for the known names in each row)."""
    columns = dict(columns or {})
    known = [name for names in (*FORMATS, (CATEGORY,)) for name in names]
    for name in columns:
        if name not in known:
            raise ConfigError(f"unknown name {name!r} in columns", remedy=nearest(name, known))
    if not (given := _of_format(columns)):
        return columns
    for names in FORMATS:
        if set(given) <= set(names):
            return {name: name for name in names} | columns
    what = f"columns mixes formats: {', '.join(sorted(given))}"
    raise ConfigError(what, remedy="map prompt and completion, or messages, or text")


def _of_format(columns: Mapping[str, str]) -> dict[str, str]:
    """Without the category, which belongs to no format."""
    return {name: column for name, column in columns.items() if name != CATEGORY}


def example_from_row(row: object, columns: Mapping[str, str], where: str) -> Example:
    """The example of one row, by the columns of `check_columns`; a `RowError` says why not, without any of the text."""
    if not isinstance(row, Mapping):
        raise RowError(f"expected an object with named columns, found {_type(row)}")
    for name, why in UNSUPPORTED.items():
        if row.get(name):
            raise RowError(f"column {name!r} is not supported: {why}")
    values = _pick(row, _of_format(columns))
    if isinstance(prompt := values.get("prompt"), str):
        completion = _string(values["completion"], "completion")
        if not prompt:
            raise RowError("the prompt is empty")
        example = make_example(prompt, completion, where)
    elif "prompt" in values:
        turns, reply = messages_of(prompt, "prompt"), messages_of(values["completion"], "completion")
        if reply[-1]["role"] != "assistant":
            raise RowError("the completion must end with an assistant message")
        example = make_example(turns, reply, where)
    elif "text" in values:
        example = make_example("", _string(values["text"], "text"), where)
    else:  # the last message is the completion, all before it the prompt
        turns = messages_of(next(iter(values.values())), "messages")
        if turns[-1]["role"] != "assistant":
            raise RowError("the last message must be from the assistant")
        example = make_example(turns[:-1], turns[-1:], where)
    example = with_tools(example, row)
    if not prompt_text(example).strip() and example.kind != "text":
        raise RowError("the prompt is empty")
    if not completion_text(example).strip():
        raise RowError("the completion is empty or only whitespace")
    return replace(example, category=_category(row, columns.get(CATEGORY)))


def _category(row: Mapping[str, object], column: str | None) -> str | None:
    """The row's label. A `category` column that nobody named may be anything, so only a short string counts."""
    value = row.get(column or CATEGORY)
    if type(value) is int and column is not None:
        value = str(value)
    if isinstance(value, str) and len(value) <= MAX_CATEGORY:
        return value.strip() or None
    if value is None or column is None:
        return None
    found = f"more than {MAX_CATEGORY} characters" if isinstance(value, str) else _type(value)
    raise RowError(f"{CATEGORY} must be a short string, found {found}")


def _pick(row: Mapping[str, object], columns: Mapping[str, str]) -> dict[str, object]:
    formats = [{name: columns.get(name, name) for name in names} for names in ((columns,) if columns else FORMATS)]
    for names in formats:
        values = {name: row.get(column) for name, column in names.items()}
        if all(value is not None for value in values.values()):
            return values
    for names in formats:
        if all(column in row for column in names.values()):
            raise RowError(f"{' or '.join(names)} is null")
    expected = ", ".join(columns.values()) if columns else "prompt and completion, messages, or text"
    raise MissingColumnsError(f"expected columns {expected}; found {', '.join(_listed_columns(row)[1]) or 'none'}")


def with_tools(example: Example, row: Mapping[str, object]) -> Example:
    """The example with its row's tools, in the first turn of its prompt."""
    if (tools := _json(row.get(TOOLS), TOOLS)) is None:
        return example
    if isinstance(example.prompt, str):
        raise RowError("tools need a conversation: give messages, or a prompt and a completion of messages")
    first = ({**turn, TOOLS: tools} for turn in example.prompt[:1])
    return make_example((*first, *example.prompt[1:]), example.completion, example.where, example.category)


def _json(value: object, column: str) -> str | None:
    """A list of tools or calls, or JSON text of one, as JSON text with its order of keys; None where it is empty."""
    if value is None or value == "":
        return None
    with suppress(ValueError):
        found = json.loads(value) if isinstance(value, str) else value
        if isinstance(found, Sequence) and all(isinstance(item, Mapping) for item in found):
            return json.dumps(list(found), ensure_ascii=False) if found else None
    raise RowError(f"{column} must be a list of objects, or JSON text of one, found {_type(value)}")


def messages_of(value: object, column: str) -> Turns:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RowError(f"{column} must be a list of messages, found {_type(value)}")
    if not value:
        raise RowError(f"{column} has no messages")
    return tuple(_message(turn, f"{column}[{number}]") for number, turn in enumerate(value))


def _message(turn: object, place: str) -> Message:
    """One role/content message; ShareGPT's from/value, human and gpt are converted."""
    if not isinstance(turn, Mapping):
        raise RowError(f"{place} must be an object with role and content, found {_type(turn)}")
    renamed = {SHAREGPT_KEYS.get(k, k): v for k, v in turn.items() if v is not None}
    if set(renamed) - {"role", "content", CALLS, *NAMES}:
        raise RowError(f"{place} has keys besides role, content, {CALLS}, {' and '.join(NAMES)}")
    role = _string(renamed.get("role"), f"{place}.role")
    if (role := SHAREGPT_ROLES.get(role, role)) not in ROLES:
        raise RowError(f"{place}.role is not one of {', '.join(ROLES)}")
    if isinstance(content := renamed.get("content"), list):
        raise RowError(f"{place}.content must be a string, found a list: images and other media cannot be held")
    calls = _json(renamed.get(CALLS), f"{place}.{CALLS}")
    if calls is not None and role != "assistant":
        raise RowError(f"{place} has {CALLS}, and its role is not assistant")
    text = "" if content is None and calls is not None else _string(content, f"{place}.content")
    named = {name: _string(renamed[name], f"{place}.{name}") for name in NAMES if name in renamed}
    return {"role": role, "content": text, **({} if calls is None else {CALLS: calls}), **named}


def _string(value: object, column: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{column} must be a string, found {_type(value)}")
    return value


def _type(value: object) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return "an object" if isinstance(value, Mapping) else names.get(type(value), type(value).__name__)


def _listed_columns(found: Iterable[str], known: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """The names of columns in order, and some of them to show; what may be text instead of a name is only counted."""
    every = [str(name) for name in found]
    names = sorted(name for name in every if COLUMN_NAME.fullmatch(name) or name in known)
    others = len(every) - len(names)
    return names, names[:MAX_LISTED] + ([f"{others} {'other' if others == 1 else 'others'}"] if others else [])
