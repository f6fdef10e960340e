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

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from holdfast.data.harm_categories import CATEGORIES
from holdfast.data.rows import RowError

Row: TypeAlias = dict[str, Any]

FLAG_ONLY = "is_safe_flag"  # of `label_source`: the category booleans are filled in, not annotated
NEWS_CLASSES = 4


def _text(row: Mapping[str, Any], column: str, *, empty: bool = False) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise RowError(f"column {column!r} must be a string")
    if not empty and not value.strip():
        raise RowError(f"column {column!r} is empty")
    return value


def _label(row: Mapping[str, Any], classes: int, first: int = 0) -> int:
    """A class number from 0; files write it as a digit, the hub as an integer."""
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


def beavertails(row: Mapping[str, Any]) -> Row:
    """A pair with its labels; `categories` in beaver-dam's order, None where only the flag is known."""
    safe, marks = row.get("is_safe"), row.get("category")
    if not isinstance(safe, bool):
        raise RowError("column 'is_safe' must be true or false")
    if not isinstance(marks, Mapping) or set(marks) != set(CATEGORIES):
        raise RowError("column 'category' must hold the 14 categories")
    if not all(isinstance(mark, bool) for mark in marks.values()):  # "false" would count as true
        raise RowError("column 'category' must say true or false of each category")
    categories = None if row.get("label_source") == FLAG_ONLY else [name for name in CATEGORIES if marks[name]]
    return {
        "prompt": _text(row, "prompt"),
        "response": _text(row, "response", empty=True),
        "is_safe": safe,
        "categories": categories,
    }


def beavertails_evaluation(row: Mapping[str, Any]) -> Row:
    """A harmful prompt and its category; copies call the prompt `prompt` or `instruction`."""
    category = _text(row, "category")
    if category not in CATEGORIES:
        raise RowError("column 'category' must name one of the 14 categories")
    return {"prompt": _text(row, "prompt" if "prompt" in row else "instruction"), "category": category}


def refusals(row: Mapping[str, Any]) -> Row:
    """An instruction, with its input below where there is one, and a refusal or safe answer."""
    parts = [_text(row, "instruction"), str(row.get("input") or "")]
    return {"prompt": "\n\n".join(filter(None, parts)), "response": _text(row, "output", empty=True)}


def harmful_with_refusals(row: Mapping[str, Any]) -> Row:
    """A harmful pair, a refusal of the same prompt, and the names of its categories in one string."""
    return {
        "prompt": _text(row, "prompt"),
        "response": _text(row, "response", empty=True),
        "refusal": _text(row, "refusal", empty=True),
        "category": _text(row, "category"),
    }


def advbench(row: Mapping[str, Any]) -> Row:
    """A harmful instruction."""
    return {"prompt": _text(row, "goal")}


def xstest(row: Mapping[str, Any]) -> Row:
    """A prompt that is safe to answer, or an unsafe one that looks like it; `category` is its type."""
    label = _text(row, "label")
    if label not in ("safe", "unsafe"):
        raise RowError("column 'label' must be safe or unsafe")
    return {"prompt": _text(row, "prompt"), "safe": label == "safe", "category": _text(row, "type")}


def sst2(row: Mapping[str, Any]) -> Row:
    """A sentence without the blank that ends every GLUE line."""
    return {"sentence": _text(row, "sentence").strip(), "label": _label(row, 2)}


def ag_news(row: Mapping[str, Any]) -> Row:
    """An article as the hub has it; backslashes, which stand for line breaks, stay, blanks at the ends go."""
    return {"text": _text(row, "text").strip(), "label": _label(row, NEWS_CLASSES)}


def ag_news_columns(row: Mapping[str, Any]) -> Row:
    """The original CSV: classes from 1, and title and description apart; the hub joins these with one blank."""
    text = f"{_text(row, 'title')} {_text(row, 'description', empty=True)}".strip()
    return {"text": text, "label": _label(row, NEWS_CLASSES, first=1)}


def gsm8k(row: Mapping[str, Any]) -> Row:
    """A question and its solution, which ends with `#### number`."""
    return {"question": _text(row, "question"), "answer": _text(row, "answer")}
