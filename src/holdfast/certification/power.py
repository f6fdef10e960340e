"""How many prompts a certificate needs when the model is as good as one believes.

Power is the probability of certifying at a true rate p < alpha: P(Bin(n, p) <= k(n)), k(n) the most regressions that
certify. It is saw-toothed in n: it jumps where k(n) grows and falls in between, so the first n that reaches a wanted
power is always one of the jumps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainccinv

from holdfast.certification.arguments import confidence_level, grid_alpha, rate
from holdfast.certification.binomial import most_regressions, tail
from holdfast.core.errors import InfeasibleError

LARGEST = 1_000_000  # prompts; nobody labels more, and the search stays within seconds
_FIRST_CHUNK = 64


def power(n: int, alpha: float, confidence: float, true_rate: float, *, parts: int = 1) -> float:
    """Returns the exact probability that n prompts certify at `true_rate`; 0 when n is too small.

    At a true rate above alpha it is the probability of a false certificate.
    """
    true_rate = rate("true_rate", true_rate, zero=True)
    allowed = most_regressions(n, alpha, confidence, parts=parts)
    return 0.0 if allowed is None else float(tail(allowed, n, true_rate))


def largest_true_rate(n: int, alpha: float, confidence: float, power: float, *, parts: int = 1) -> float | None:
    """Returns the highest true rate at which n prompts certify with probability `power`; None when n is too small."""
    wanted = rate("power", power)
    allowed = most_regressions(n, alpha, confidence, parts=parts)
    return None if allowed is None else float(betainccinv(allowed + 1, n - allowed, wanted))


def prompts_for_power(
    alpha: float, confidence: float, true_rate: float, power: float, *, parts: int = 1
) -> tuple[int, int]:
    """Returns (n, k): the first n whose exact power reaches `power`, and the most regressions it allows."""
    wanted, true_rate = rate("power", power), rate("true_rate", true_rate, zero=True)
    limit, level = grid_alpha(alpha), confidence_level(confidence, parts)
    if true_rate >= limit:
        raise InfeasibleError(
            f"true rate {true_rate:g} is not below alpha = {limit:g}: no number of prompts certifies it with power",
            remedy="choose a larger alpha, or plan for a lower true rate",
        )
    start, chunk = 0, _FIRST_CHUNK
    while True:
        k = np.arange(start, start + chunk)
        n = _first_prompts(k, limit, level)
        reached = (tail(k, n, true_rate) >= wanted) & (n <= LARGEST)
        if reached.any():
            place = int(reached.argmax())
            return int(n[place]), int(k[place])
        if n[-1] > LARGEST:
            raise InfeasibleError(
                f"true rate {true_rate:g} is so close to alpha = {limit:g} that power {wanted:g} takes more than "
                f"{LARGEST:,} prompts",
                remedy="choose a larger alpha, a lower power, or plan for a lower true rate",
            )
        start, chunk = start + chunk, chunk * 2


def _first_prompts(k: NDArray[np.int64], alpha: float, level: float) -> NDArray[np.int64]:
    """Returns, for each k, the smallest n with P(Bin(n, alpha) <= k) <= level; `LARGEST` + 1 where it lies beyond."""
    below, above = k, np.full_like(k, LARGEST + 1)
    while (above - below > 1).any():
        middle = (below + above) // 2
        certifies = tail(k, middle, alpha) <= level
        below, above = np.where(certifies, below, middle), np.where(certifies, middle, above)
    return above
