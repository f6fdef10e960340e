"""One reply of a model to one prompt."""

from collections.abc import Callable
from dataclasses import dataclass, field

Progress = Callable[[int], None]
"""Receives the number of replies that are finished."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model answered to one prompt."""

    id: str  # the example's
    # without special tokens and outer white space; not in the repr, which may reach a log
    text: str = field(repr=False)
    truncated: bool  # no end token within `max_new_tokens`
    tokens: int  # new tokens, the end token not counted
