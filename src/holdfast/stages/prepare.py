"""Reading the task and safety data of a run and giving every safety example its role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import DataError
from holdfast.data.examples import Example, as_chat, searchable_texts, uniform
from holdfast.data.sources import read_examples
from holdfast.data.splits import Split, move_leaks, require_apart, require_unseen, split_examples


@dataclass(frozen=True)
class Prepared:
    """The examples of a run: what to learn, and per safety set what to steer by, watch and certify on."""

    task: list[Example]
    safety: dict[str, Split]


def prepare(task: Mapping[str, Any], safety: Mapping[str, Mapping[str, Any]], *, chat: bool, seed: int) -> Prepared:
    """Read all data of a run and split every safety set once, by prompt.

    Args:
        task: keyword arguments of `read_examples`, with the source under `data`.
        safety: the same per safety set, with `fractions` and `on_leak`.
        chat: turn prompt/completion rows into one user and one assistant turn.
        seed: decides the split, together with the content.
    """
    examples = _read(task, chat=chat)
    texts = [text for example in examples for text in searchable_texts(example)]
    splits = {}
    for name, block in safety.items():
        split = split_examples(_read(block, chat=chat), fractions=tuple(block["fractions"]), seed=seed)
        if block["on_leak"] == "move":
            split = move_leaks(split, texts)
        require_unseen(split.certify, texts)
        splits[name] = split
    require_apart(splits)
    return Prepared(task=examples, safety=splits)


def _read(block: Mapping[str, Any], *, chat: bool) -> list[Example]:
    reading = {key: block.get(key) for key in ("columns", "split", "subset", "limit", "revision")}
    examples = read_examples(block["data"], **reading)
    if not chat:
        return uniform(examples)
    try:
        return [as_chat(example) for example in examples]
    except DataError as error:
        raise DataError(error.what, remedy=f"{error.remedy}; or set `template: none`") from error
