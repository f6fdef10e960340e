"""The exact binomial test of "at most alpha of the prompts regress", and the Clopper-Pearson bound equal to it.

n independent prompts, k regressions. H0: the share p of regressing prompts exceeds alpha. Its p-value is
P(Bin(n, alpha) <= k) = I_{1-alpha}(n-k, k+1); rejected (certified) when p-value <= delta. The upper bound U solves
P(Bin(n, U) <= k) = delta, so U <= alpha exactly when the test certifies.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincc, betainccinv, betaincinv

from holdfast.certification.arguments import CEILING, GRID, LARGEST_COUNT, confidence_level, count, grid_alpha, tally
from holdfast.core.errors import ConfigError, DataError

DIGITS = 12  # kept of a probability: betaincc is good to more, and ties such as 1 - 0.95 = 0.05 stay ties


def p_value(regressions: int, n: int, alpha: float) -> float:
    """Returns P(Bin(n, alpha) <= regressions): how likely so few are if a share alpha regressed."""
    k, n = tally(regressions, n)
    return float(tail(k, n, grid_alpha(alpha)))


def upper_bound(regressions: int, n: int, confidence: float = 0.95, *, parts: int = 1) -> float:
    """Returns the Clopper-Pearson upper bound of the regressing share at level (1 - confidence) / parts.

    The smallest rate of ten significant digits whose p-value is at most the level: the real-valued bound rounded
    up, and <= alpha exactly when the test at alpha certifies.
    """
    return _upper_bound(*tally(regressions, n), confidence_level(confidence, parts))


@lru_cache(maxsize=4096)  # a search for the smallest tau, and every category, ask for the same counts again
def _upper_bound(k: int, n: int, level: float) -> float:
    if k == n:
        return 1.0
    return smallest_rate(float(betainccinv(k + 1, n - k, level)), lambda rate: float(tail(k, n, rate)), level)


def smallest_rate(guess: float, p_value: Callable[[float], float], level: float) -> float:
    """Returns the smallest rate of ten significant digits whose p-value is at most the level, searched from a guess."""
    bound = CEILING.create_decimal(repr(guess))
    while (lower := GRID.next_minus(bound)) > 0 and p_value(float(lower)) <= level:
        bound = lower
    while bound < 1 and p_value(float(bound)) > level:
        bound = GRID.next_plus(bound)
    return float(min(bound, Decimal(1)))


def interval(hits: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Returns the two-sided Clopper-Pearson interval of a share: each side misses with at most half of delta."""
    k, n = tally(hits, n)
    low = 0.0 if k == 0 else float(betaincinv(k, n - k + 1, confidence_level(confidence, 2)))
    return float(GRID.create_decimal(repr(low))), upper_bound(k, n, confidence, parts=2)


def fewest_prompts(alpha: float, confidence: float = 0.95, regressions: int = 0, *, parts: int = 1) -> int:
    """Returns the smallest n at which `regressions` still certify; for none it is ceil(ln delta / ln(1 - alpha))."""
    found = _fewest(count("regressions", regressions), grid_alpha(alpha), confidence_level(confidence, parts))
    if found > LARGEST_COUNT:
        what = f"alpha = {alpha!r} at confidence {confidence!r} needs more than {LARGEST_COUNT:.0e} prompts"
        raise ConfigError(what, remedy="choose a larger alpha")
    return found


@lru_cache(maxsize=4096)
def _fewest(k: int, rate: float, level: float) -> int:
    sizes = range(k + 1, LARGEST_COUNT + 1)  # n = k prompts that all regressed never certify
    return k + 1 + bisect_left(sizes, True, key=lambda n: bool(tail(k, n, rate) <= level))


def most_regressions(n: int, alpha: float, confidence: float = 0.95, *, parts: int = 1) -> int | None:
    """Returns the largest number of regressions among n prompts that certifies; None when even 0 does not."""
    _, n = tally(0, n)
    rate, level = grid_alpha(alpha), confidence_level(confidence, parts)
    too_many = bisect_left(range(n), True, key=lambda k: bool(tail(k, n, rate) > level))
    return too_many - 1 if too_many else None


def tail(k: ArrayLike, n: ArrayLike, rate: float) -> NDArray[np.float64]:
    """Returns P(Bin(n, rate) <= k) elementwise, 1 where k >= n, to `DIGITS` significant digits."""
    k, n = np.asarray(k), np.asarray(n)
    if rate == 0:
        return np.ones(np.broadcast_shapes(k.shape, n.shape))
    return rounded(np.where(k >= n, 1.0, betaincc(k + 1, np.maximum(n - k, 1), rate)))


def rounded(probability: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns probabilities to `DIGITS` significant digits; those below 1e-290 as they are."""
    tiny = probability < 1e-290
    exponent = np.floor(np.log10(np.where(tiny, 1.0, probability)))
    scale = 10.0 ** (DIGITS - 1 - exponent)
    return np.where(tiny, probability, np.rint(probability * scale) / scale)


@dataclass(frozen=True)
class Rate:
    """A share with its exact interval: `hits` of `n`, with 0 <= hits <= n and n >= 1."""

    hits: int
    n: int

    def __post_init__(self) -> None:
        if not (self.n >= 1 and 0 <= self.hits <= self.n):
            what = f"a rate of {self.hits} in {self.n}, expected 0 <= hits <= n and n >= 1"
            raise DataError(what, remedy="measure on at least one example")

    @property
    def value(self) -> float:
        return self.hits / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """Clopper-Pearson, 95 %."""
        return interval(self.hits, self.n)

    def as_json(self) -> dict[str, float]:
        low, high = self.interval
        return {"rate": self.value, "hits": self.hits, "n": self.n, "low": low, "high": high}
