"""Rows of the public data sets in one shape each, whichever copy they come from.

| data set               | columns                                              |
|------------------------|------------------------------------------------------|
| beavertails            | prompt, response, is_safe, categories (None: unknown) |
| beavertails_evaluation | prompt, category                                     |
| refusals               | prompt, response                                     |
| harmful_with_refusals  | prompt, response, refusal, category                  |
| advbench               | prompt                                               |
| xstest                 | prompt, safe, category                               |
| sst2                   | sentence, label (0 negative, 1 positive)             |
| ag_news                | text, label (0 to 3: World, Sports, Business, Sci/Tech) |
| gsm8k                  | question, answer                                     |
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from holdfast.data.harm_categories import CATEGORIES
from holdfast.data.rows import RowError

Row: TypeAlias = dict[str, Any]
Column: TypeAlias = Callable[[Mapping[str, Any]], Any]  # a column's value, read from the row of a copy
Convert: TypeAlias = Callable[[Mapping[str, Any]], Row]

FLAG_ONLY = "is_safe_flag"  # of `label_source`: the category booleans are filled in, not annotated


def _columns(**columns: Column) -> Convert:
    return lambda row: {name: read(row) for name, read in columns.items()}


def _text(column: str, *, empty: bool = False) -> Column:
    def read(row: Mapping[str, Any]) -> str:
        value = row.get(column)
        if not isinstance(value, str):
            raise RowError(f"column {column!r} must be a string")
        if not empty and not value.strip():
            raise RowError(f"column {column!r} is empty")
        return value

    return read


def _label(classes: int, first: int = 0) -> Column:
    """A class number from 0; files write it as a digit, the hub as an integer."""

    def read(row: Mapping[str, Any]) -> int:
        value = row.get("label")
        try:
            if not isinstance(value, str) and type(value) is not int:  # int() would cut 0.9 and take True
                raise TypeError
            label = int(value) - first
        except (TypeError, ValueError):
            raise RowError("column 'label' must be a whole number") from None
        if not 0 <= label < classes:
            raise RowError(f"column 'label' must be {first} to {classes - 1 + first}")
        return label

    return read


def _is_safe(row: Mapping[str, Any]) -> bool:
    if not isinstance(safe := row.get("is_safe"), bool):
        raise RowError("column 'is_safe' must be true or false")
    return safe


def _categories(row: Mapping[str, Any]) -> list[str] | None:
    """In beaver-dam's order, None where only the flag is known."""
    marks = row.get("category")
    if not isinstance(marks, Mapping) or set(marks) != set(CATEGORIES):
        raise RowError("column 'category' must hold the 14 categories")
    if not all(isinstance(mark, bool) for mark in marks.values()):  # "false" would count as true
        raise RowError("column 'category' must say true or false of each category")
    return None if row.get("label_source") == FLAG_ONLY else [name for name in CATEGORIES if marks[name]]


def _category(row: Mapping[str, Any]) -> str:
    if (category := _text("category")(row)) not in CATEGORIES:
        raise RowError("column 'category' must name one of the 14 categories")
    return str(category)


def _safe(row: Mapping[str, Any]) -> bool:
    if (label := _text("label")(row)) not in ("safe", "unsafe"):
        raise RowError("column 'label' must be safe or unsafe")
    return bool(label == "safe")


_prompt, _response = _text("prompt"), _text("response", empty=True)
beavertails = _columns(is_safe=_is_safe, categories=_categories, prompt=_prompt, response=_response)
beavertails_evaluation = _columns(  # copies call the prompt `prompt` or `instruction`
    category=_category, prompt=lambda row: _text("prompt" if "prompt" in row else "instruction")(row)
)
refusals = _columns(  # an instruction, with its input below where there is one
    prompt=lambda row: "\n\n".join(filter(None, [_text("instruction")(row), str(row.get("input") or "")])),
    response=_text("output", empty=True),
)
harmful_with_refusals = _columns(
    prompt=_prompt, response=_response, refusal=_text("refusal", empty=True), category=_text("category")
)
advbench = _columns(prompt=_text("goal"))
xstest = _columns(safe=_safe, prompt=_prompt, category=_text("type"))  # its unsafe prompts look like safe ones
# Every GLUE line ends with a blank.
sst2 = _columns(sentence=lambda row: _text("sentence")(row).strip(), label=_label(2))
# Backslashes, which stand for line breaks, stay, as the hub has them.
ag_news = _columns(text=lambda row: _text("text")(row).strip(), label=_label(4))
ag_news_columns = _columns(  # the original CSV: classes from 1; the hub joins title and description with one blank
    text=lambda row: f"{_text('title')(row)} {_text('description', empty=True)(row)}".strip(), label=_label(4, first=1)
)
gsm8k = _columns(question=_text("question"), answer=_text("answer"))  # a solution ends with `#### number`
