"""What a statistical function accepts, and how it reads a number a person wrote.

0.95 and 0.1 have no exact binary form: 1 - 0.95 is above 0.05 and 0.29 * 100 below 29 by rounding alone. Rates and
confidences are therefore read as the decimals they print as, and only then computed with.
"""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from numbers import Integral, Real

from holdfast.core.errors import ConfigError, DataError

# Alphas and bounds live on a grid of ten significant digits, a hundred times coarser than the twelve kept of a
# p-value, so that rounding can never make `p_value <= level` and `upper_bound <= alpha` disagree.
GRID = Context(prec=10, rounding=ROUND_FLOOR)
CEILING = Context(prec=10, rounding=ROUND_CEILING)
# Below one half a bound covers less often than it misses; and 0.05 is a slip for 0.95.
LEAST_CONFIDENCE = 0.5
LARGEST_COUNT = 10**15  # beyond it, n and n - 1 round to the same beta parameters


def rate(name: str, value: object, *, zero: bool = False) -> float:
    """Returns `value` as a float if it is a share in (0, 1), or in [0, 1) where zero is allowed."""
    x = number(value)
    if not (0 < x < 1 or (zero and x == 0)):
        what = f"{name} = {value!r}, expected a share with {'0 <=' if zero else '0 <'} {name} < 1"
        raise ConfigError(what, remedy=f"set {name} to, say, 0.05")
    return x


def grid_alpha(alpha: object) -> float:
    """Returns a checked alpha, cut (never raised) to ten significant digits."""
    return float(GRID.create_decimal(repr(rate("alpha", alpha))))


def confidence_level(confidence: object, parts: object = 1) -> float:
    """Returns delta / parts, delta = 1 - confidence in decimals: 0.95 gives 0.05, not 0.05 + 4e-17.

    `parts` is the number of tests that share delta: openings of a split, categories, or both multiplied.
    """
    x = number(confidence)
    if not LEAST_CONFIDENCE <= x < 1:
        hint = f"; 1 - {x:g} may be meant" if 0 < x < LEAST_CONFIDENCE else ""
        what = f"confidence = {confidence!r}, expected {LEAST_CONFIDENCE:g} <= confidence < 1{hint}"
        raise ConfigError(what, remedy="set confidence to 0.95, or another share of at least one half and below one")
    return float((1 - exact(x)) / count("parts", parts, least=1))


def exact(value: float) -> Fraction:
    """Returns the decimal that `value` prints as, exactly."""
    return Fraction(Decimal(repr(float(value))))


def count(name: str, value: object, *, least: int = 0) -> int:
    """Returns `value` as an int if it is a whole number >= least; True and 3.0 are not."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        what = f"{name} = {value!r}, expected a whole number >= {least}"
        raise ConfigError(what, remedy=f"give {name} as a count, such as {least}")
    return int(value)


def tally(regressions: object, n: object) -> tuple[int, int]:
    """Returns (regressions, n) if 0 <= regressions <= n and n >= 1."""
    k, size = count("regressions", regressions), count("n", n)
    if size > LARGEST_COUNT:
        raise ConfigError(f"n = {size}, expected at most {LARGEST_COUNT:.0e}", remedy="count prompts")
    if size == 0:
        raise DataError("n = 0: no prompts, expected at least one", remedy="measure prompts first")
    if k > size:
        what = f"regressions = {k} of n = {size}, expected at most n"
        raise DataError(what, remedy="give the number of regressed prompts first, then the number of all prompts")
    return k, size


def number(value: object) -> float:
    """Returns a real number as a float; NaN for anything else, True included."""
    return math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
