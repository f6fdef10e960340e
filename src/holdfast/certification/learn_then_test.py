"""The largest adapter strength that certifies: Learn-then-Test by a fixed sequence.

Strengths are tested in an order fixed beforehand, each at the full level, until the first failure. A false pass needs
the first truly violating strength of the sequence to pass, one event of probability at most the level. So no share of
delta is lost to the search, whatever the dependence between strengths and whether or not harm grows with strength.
Testing past a failure would break this.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from holdfast.certification.binomial import p_value
from holdfast.core.errors import ConfigError

STRENGTHS: tuple[float, ...] = tuple(tenth / 10 for tenth in range(1, 11))


@dataclass(frozen=True)
class Tested:
    """One strength (the factor on the adapter's change of the weights), what was counted at it, and whether it passed.

    `p_value` is of H0 "more than alpha regress at this strength"; `passed` is set by `fixed_sequence`.
    """

    strength: float
    regressions: int
    n: int
    p_value: float
    passed: bool = False

    @classmethod
    def binomial(cls, strength: float, regressions: int, n: int, alpha: float) -> Tested:
        """Returns the exact binomial test at one strength."""
        return cls(strength, int(regressions), int(n), p_value(regressions, n, alpha))


def fixed_sequence(strengths: Sequence[float], test: Callable[[float], Tested], level: float) -> list[Tested]:
    """Returns the tested strengths in order, the last of them the first failure unless all passed.

    `test` measures one strength; it is not called after a failure.
    """
    finite = len(strengths) > 0 and all(math.isfinite(s) and s > 0 for s in strengths)
    if not finite or any(b <= a for a, b in itertools.pairwise(strengths)):
        raise ConfigError(
            f"strengths = {list(strengths)}, expected positive numbers in increasing order",
            remedy="use the default 0.1, 0.2, ..., 1.0",
        )
    if isinstance(level, bool) or not 0 < level < 1:
        raise ConfigError(f"level = {level!r}, expected 0 < level < 1", remedy="pass delta, such as 0.05")
    tested: list[Tested] = []
    for strength in strengths:
        outcome = test(strength)
        tested.append(replace(outcome, passed=bool(outcome.p_value <= level)))  # NaN fails
        if not tested[-1].passed:
            break
    return tested


def largest(tested: Sequence[Tested]) -> float | None:
    """Returns the last strength before the first failure; None when the first failed."""
    passed = list(itertools.takewhile(lambda outcome: outcome.passed, tested))
    return passed[-1].strength if passed else None
