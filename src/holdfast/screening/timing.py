"""How long asking will take, measured on its own prompts before the others are asked.

Of the prompts without a stored reply, those of about average length go first: one batch to warm up, one by the clock.
Their replies are stored, so that no work is lost. With r seconds a prompt and n prompts left, an estimate is

    r n                to sort the replies
    r n/4 * 256/32     more, at most about, where a quarter of them is held whole

The cost of a batch grows about linearly with the length of its prompts, so that average ones stand for all.
"""

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from holdfast.data.examples import Example, prompt_text
from holdfast.screening.asking import HELD, HELD_SHARE, SORTING, Asker

LARGEST_SHARE = 8  # of the prompts, one in so many warms up and one in so many is timed, at most


@dataclass(frozen=True)
class AskingTime:
    """Seconds that asking will take, and what they were measured on."""

    timed: int  # prompts that were asked by the clock
    seconds: float  # that they took
    left: int  # prompts that are asked after them

    @property
    def sorting(self) -> float:
        return self.seconds / self.timed * self.left

    @property
    def holding(self) -> float:
        """More, at most about, for the replies that are held whole."""
        return self.sorting * HELD_SHARE * HELD / SORTING

    def sentence(self) -> str:
        return (
            f"estimated {_shown(self.sorting)} to sort the replies to {self.left:,} more prompts, and at most about "
            f"{_shown(self.holding)} for the whole replies that are held ({self.timed} prompts took "
            f"{self.seconds:.1f} s)"
        )


def measured(asker: Asker, examples: Sequence[Example]) -> AskingTime | None:
    """Ask a few of the prompts, and say how long the others will take; None where too few are left to ask."""
    waiting = asker.unanswered(examples)
    size = min(asker.batch, len(waiting) // LARGEST_SHARE)
    if size == 0:
        return None
    chosen = of_average_length(waiting, 2 * size)
    asker.ask(chosen[::2], SORTING, "a first batch")
    start = time.monotonic()
    asker.ask(chosen[1::2], SORTING, "a batch by the clock")
    return AskingTime(size, time.monotonic() - start, len(waiting) - 2 * size)


def of_average_length(examples: Sequence[Example], count: int) -> list[Example]:
    """The `count` prompts around the average length in characters, shortest first."""
    ordered = sorted(examples, key=lambda example: len(prompt_text(example)))
    lengths = [len(prompt_text(example)) for example in ordered]
    middle = bisect_left(lengths, sum(lengths) / len(lengths))
    start = min(max(0, middle - count // 2), len(ordered) - count)
    return ordered[start : start + count]


def _shown(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
