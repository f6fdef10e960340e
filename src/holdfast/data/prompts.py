"""Prompts to be replied to: rows of a data file of which only the prompt matters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from itertools import islice
from typing import Any

from holdfast.core.errors import DataError
from holdfast.data.examples import Example, Turns, as_chat, make_example
from holdfast.data.rows import (
    CATEGORY,
    MissingColumnsError,
    Problems,
    RowError,
    check_columns,
    example_from_row,
    messages_of,
    missing_columns_error,
)
from holdfast.data.sources import RowSource, open_rows, rows_in_memory


def read_prompts(
    source: str,
    *,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    subset: str | None = None,
    limit: int | None = None,
    revision: str | None = None,
) -> list[Example]:
    """Read the prompts of a file or hub data set, each once; a completion may be there and is not looked at.

    Arguments and errors as for `holdfast.data.sources.read_examples`.
    """
    return _read(open_rows(source, split=split, subset=subset, revision=revision), columns, limit)


def prompts_in_memory(rows: Iterable[Mapping[str, Any]]) -> list[Example]:
    """The same for rows in memory."""
    return _read(rows_in_memory(rows, "prompts"), None, None)


def _read(rows: RowSource, columns: Mapping[str, str] | None, limit: int | None) -> list[Example]:
    wanted = check_columns(columns)
    problems = Problems(rows.name)
    found: dict[str, Example] = {}
    with closing(rows.read(problems)) as read:
        for where, row in islice(read, limit):
            try:
                example = _example(row, wanted, where)
            except MissingColumnsError:
                raise missing_columns_error(where, row, wanted) from None
            except RowError as error:
                problems.add(where, str(error))
                continue
            found.setdefault(prompt_key(example), example)
    problems.raise_if_any()
    if not found:
        raise DataError(f"{rows.name} holds no prompts", remedy="give a file with a prompt column")
    return list(found.values())


def prompt_key(example: Example) -> str:
    """What makes two prompts the same one to a model: every turn, the assistant's too."""
    return json.dumps(as_chat(example).prompt if example.kind != "text" else example.completion, sort_keys=True)


def _example(row: Any, columns: Mapping[str, str], where: str) -> Example:
    """The row as an example; one with a prompt alone, a string or several turns, has an empty completion."""
    try:
        return example_from_row(row, columns, where)
    except MissingColumnsError:
        prompt = row.get(columns.get("prompt", "prompt"))
        if isinstance(prompt, list | tuple):
            prompt = _asked_turns(prompt)
        elif not isinstance(prompt, str) or not prompt.strip():
            raise
        category = row.get(columns.get(CATEGORY, CATEGORY))
        return make_example(prompt, "", where, category if isinstance(category, str) else None)


def _asked_turns(prompt: Any) -> Turns:
    turns = messages_of(prompt, "prompt")
    if turns[-1]["role"] != "user" or not turns[-1]["content"].strip():
        raise RowError("the last message of a prompt must be the user's, with some text")
    return turns
