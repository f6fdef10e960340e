"""How long a step may be: the barrier is linear in a gradient that a few rows only estimate.

`a_k` is the averaged gradient of constraint k that the filter uses, `b_k` the newest batch's. Along a nominal step s
the batch and the average disagree about the change of g_k by `(b_k - a_k) . s`; its size per unit of movement is

    e_k = sqrt( mean over steps t of ((b_k - a_k) . s_t / norm(s_t))^2 ).

A step may use `rate` of the slack `-v_k`. It is shortened, before it is corrected, to the share

    min_k  rate max(0, -v_k) / (caution e_k norm(s)),  within [LEAST, 1],

so that `caution` such errors stay within what it may use. With no slack left the share is LEAST: the correction that
follows then has little to undo.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

KEPT = 0.95  # weight of the past in e_k: one batch's disagreement is itself noise
LEAST = 0.1  # a step of no length would teach nothing, and measure no error either


@dataclass
class GradientError:
    """The running e_k of every constraint; part of a checkpoint."""

    steps: int = 0
    squares: list[float] = field(default_factory=list)

    def update(self, unforeseen: Sequence[float], norm: float) -> list[float]:
        """Take in `(b_k - a_k) . s` of a step of that norm; returns e_k."""
        if norm > 0.0:
            self.steps += 1
            self.squares = self.squares or [0.0] * len(unforeseen)
            weight = (1.0 - KEPT) / (1.0 - KEPT**self.steps)
            pairs = zip(self.squares, unforeseen, strict=True)
            self.squares = [old + weight * ((new / norm) ** 2 - old) for old, new in pairs]
        return [math.sqrt(square) for square in self.squares] or [0.0] * len(unforeseen)


def step_share(values: Sequence[float], errors: Sequence[float], norm: float, *, rate: float, caution: float) -> float:
    """The share of a nominal step to take, in [LEAST, 1]; 1 where nothing is uncertain.

    Args:
        values: v_k, negative while there is slack.
        errors: e_k.
        norm: of the nominal step.
        rate: gamma, the share of the slack one step may use.
        caution: how many errors must stay within it; 0 never shortens.
    """
    share = 1.0
    for value, error in zip(values, errors, strict=True):
        risk = caution * error * norm
        if risk > 0.0:
            share = min(share, rate * max(0.0, -value) / risk)
    return max(share, LEAST)
