"""The prompts of a task data set as text, to prove that no certify prompt is among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.data.examples import prompt_text
from holdfast.data.sources import examples_from_rows


def task_prompts(dataset: Any, formatting: Callable[[Any], str] | None, text_field: str) -> list[str] | None:
    """One string per row: its prompt, or the whole text where there is no prompt.

    None when the rows cannot be read as text: a stream, tokenised rows, or no data set at all.
    """
    if dataset is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "column_names"):
        return None
    if formatting is not None:
        return [formatting(row) for row in dataset]
    columns = set(dataset.column_names)
    if text_field in columns and not {"prompt", "messages", "conversations"} & columns:
        return [str(text) for text in dataset[text_field]]
    if not {"prompt", "messages", "conversations"} & columns:
        return None
    return [prompt_text(example) for example in examples_from_rows(dataset, name="train_dataset")]
