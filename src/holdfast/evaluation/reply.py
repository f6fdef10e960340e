"""One reply of a model to one prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Progress = Callable[[int], None]
"""Receives the number of replies that are finished."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model answered to one prompt.

    Attributes:
        id: the example's.
        text: without special tokens and outer white space; not in the repr, which may reach a log.
        truncated: no end token within `max_new_tokens`.
        tokens: new tokens, the end token not counted.
    """

    id: str
    text: str = field(repr=False)
    truncated: bool
    tokens: int
