"""Shares as percentages. Rounding must not say more than is known, so it depends on what the share is."""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

_UPWARDS, _DOWNWARDS = (Context(prec=3, rounding=way) for way in (ROUND_CEILING, ROUND_FLOOR))


def percent(share: float) -> str:
    """A measured share with one decimal, two or a limit where one would read as 0 or 100 while it is not."""
    if not math.isfinite(share):
        return "not a number"
    short = f"{100 * share:.1f}"
    if float(short) in (0.0, 100.0) and 0 < share < 1:
        short = f"{100 * share:.2f}"
        if float(short) in (0.0, 100.0):
            return "< 0.01 %" if share < 0.5 else "> 99.99 %"
    return f"{short.rstrip('0').rstrip('.')} %"


def percent_up(share: float) -> str:
    """An upper bound in three significant digits, rounded up: rounding must not make it look better."""
    return _rounded(share, _UPWARDS)


def percent_down(share: float) -> str:
    """A lower bound in three significant digits, rounded down."""
    return _rounded(share, _DOWNWARDS)


def _rounded(share: float, way: Context) -> str:
    if not math.isfinite(share):
        return "not a number"
    return f"{way.multiply(Decimal(repr(float(share))), Decimal(100)).normalize():f} %"


def exact_percent(share: float) -> str:
    """A share that somebody chose (alpha, a confidence), not rounded at all: 1.2 % is a stronger claim than 1.25 %."""
    return f"{(Decimal(repr(float(share))) * 100).normalize():f} %"
