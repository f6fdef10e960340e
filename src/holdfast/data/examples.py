"""One training or safety example, in the three formats that TRL knows.

| format         | prompt                | completion            |
|----------------|-----------------------|-----------------------|
| plain          | string                | string                |
| conversational | tuple of messages     | tuple of messages     |
| text           | "" (there is none)    | the whole text        |

A message is `{"role": ..., "content": ...}`. The first of a conversation may have `tools` (descriptions, from the
column `tools`), an assistant's `tool_calls`; both as JSON text. So all values are strings, an example's id covers them,
and they go wherever its prompt goes; they are spelled out where a template renders them.
"""

import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from holdfast.core.errors import DataError
from holdfast.core.hashing import sha256_text

Message: TypeAlias = dict[str, str]
Turns: TypeAlias = tuple[Message, ...]
TOOLS, CALLS = "tools", "tool_calls"


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, the reply to score, and where both came from."""

    id: str  # first 16 hex digits of the sha256 of the canonical (prompt, completion); see `make_example`
    prompt: str | Turns
    completion: str | Turns
    where: str  # `file:line`, or `row 12 of <name>`
    category: str | None = None  # a label to report by, where the data has one; no part of the id

    @property
    def kind(self) -> Literal["plain", "chat", "text"]:
        if not isinstance(self.prompt, str):
            return "chat"
        return "plain" if self.prompt else "text"


def make_example(
    prompt: str | Turns, completion: str | Turns, where: str = "memory", category: str | None = None
) -> Example:
    """An example with its id: that of its conversational form, so that `as_chat` keeps it, and with it the split."""
    is_plain = isinstance(prompt, str) and prompt
    canonical = [as_turns("user", prompt), as_turns("assistant", completion)] if is_plain else [prompt, completion]
    text = json.dumps(canonical, sort_keys=True, separators=(",", ":"))
    return Example(sha256_text(text)[:16], prompt, completion, where, category)


def as_turns(role: str, content: str | Turns) -> Turns:
    """A string as one message of this role; messages as they are."""
    return ({"role": role, "content": content},) if isinstance(content, str) else content


def prompt_text(example: Example) -> str:
    """The text by which prompts are compared: the string, or all system and user contents, one a line.

    A text example has no prompt; its whole text stands in, so that a leak check still sees it.
    """
    if isinstance(example.prompt, str):
        return example.prompt or str(example.completion)
    return "\n".join(turn["content"] for turn in example.prompt if turn["role"] != "assistant")


def searchable_texts(example: Example) -> list[str]:
    """The texts of a task row in which a certify prompt is looked for.

    The joined prompt (`prompt_text`), and every turn that is not the assistant's on its own: a short question under
    a long system prompt, or as a later turn, is a small part of the joined text.
    """
    sides = (side for side in (example.prompt, example.completion) if not isinstance(side, str))
    turns = [turn["content"] for side in sides for turn in side if turn["role"] != "assistant"]
    return list(dict.fromkeys([prompt_text(example), *turns]))


def completion_text(example: Example) -> str:
    """The reply as one string: the completion, or what its assistant messages say and call, one a line."""
    if isinstance(example.completion, str):
        return example.completion
    return "\n".join(said(turn) for turn in example.completion if turn["role"] == "assistant")


def said(turn: Message) -> str:
    """What a message says, and the tools that it calls, as JSON."""
    return "\n".join(text for text in (turn["content"], turn.get(CALLS)) if text)


def has_tools(turns: Sequence[Mapping[str, str]]) -> bool:
    """Whether a conversation has tools, or calls one."""
    return any(TOOLS in turn or CALLS in turn for turn in turns)


def tools_of(turns: Sequence[Mapping[str, str]]) -> Any:
    """The tools of a conversation, as templates take them; None where it has none."""
    return next((json.loads(turn[TOOLS]) for turn in turns[:1] if TOOLS in turn), None)


def spelled_out(turns: Sequence[Mapping[str, str]]) -> list[dict[str, object]]:
    """The turns as templates and TRL take them: calls as lists, and no tools."""
    return [{k: json.loads(v) if k == CALLS else v for k, v in turn.items() if k != TOOLS} for turn in turns]


class _Separators(dict[int, str | None]):
    """A `str.translate` table filled on demand: punctuation, symbols, control to space; format marks away."""

    def __missing__(self, code: int) -> str | None:
        category = unicodedata.category(chr(code))
        separates = category[0] in "PS" or category == "Cc"
        # Joiners, direction marks and soft hyphens (Cf) are invisible.
        self[code] = " " if separates else None if category == "Cf" else chr(code)
        return self[code]


_SEPARATORS = _Separators()


def normalise(text: str) -> str:
    """NFKC, casefold, punctuation and symbols to space, whitespace collapsed.

    A text of symbols alone (emoji, say) keeps them, otherwise all such texts would be equal.
    """
    folded = text
    for _ in range(2):  # case folding can undo NFKC, and NFKC case folding
        folded = unicodedata.normalize("NFKC", folded).casefold()
    folded = unicodedata.normalize("NFKC", folded)
    return " ".join(folded.translate(_SEPARATORS).split()) or " ".join(folded.split())


def as_chat(example: Example) -> Example:
    """The conversational form: plain becomes one user and one assistant message, with the same id."""
    if example.kind == "text":
        what = f"{example.where}: a text example has no prompt and cannot become a conversation"
        raise DataError(what, remedy="give prompt and completion columns, or messages")
    if example.kind == "chat":
        return example
    prompt, reply = as_turns("user", example.prompt), as_turns("assistant", example.completion)
    return replace(example, prompt=prompt, completion=reply)


def uniform(examples: Iterable[Example]) -> list[Example]:
    """All examples in one format: where plain and conversational are mixed, plain ones become conversational."""
    every = list(examples)
    if len({example.kind for example in every}) < 2:
        return every
    if texts := [example for example in every if example.kind == "text"]:
        raise DataError(
            f"{len(texts)} text examples are mixed with {len(every) - len(texts)} prompt/completion examples "
            f"(first text example: {texts[0].where}); expected one format",
            remedy="use one format for all rows: prompt and completion, or messages, or text",
        )
    return [as_chat(example) for example in every]


def to_utf8(text: str) -> str:
    """`text` with lone surrogates (half an emoji, say) as U+FFFD: neither tokenizers nor Arrow take them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def to_utf8_turns(turns: Turns) -> list[Message]:
    """`to_utf8` for messages, as fresh dictionaries."""
    return [{name: to_utf8(text) for name, text in turn.items()} for turn in turns]


def to_rows(examples: Sequence[Example]) -> list[dict[str, object]]:
    """Rows for `datasets.Dataset.from_list` in TRL's format: prompt and completion, or text; and tools."""
    return list(each_row(examples))


def each_row(examples: Sequence[Example]) -> Iterator[dict[str, object]]:
    """The same, one at a time."""
    for example in uniform(examples):
        is_text = example.kind == "text"
        sides = (
            {"text": example.completion} if is_text else {"prompt": example.prompt, "completion": example.completion}
        )
        row: dict[str, Any] = {
            name: to_utf8(side) if isinstance(side, str) else spelled_out(to_utf8_turns(side))
            for name, side in sides.items()
        }
        tools = None if isinstance(example.prompt, str) else tools_of(example.prompt)
        yield row if tools is None else {**row, TOOLS: tools}
