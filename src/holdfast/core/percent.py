"""Shares as percentages. Rounding must not say more than is known, so it depends on what the share is."""

import math
from decimal import Decimal


def percent(share: float) -> str:
    """A measured share with one decimal, two or a limit where one would read as 0 or 100 while it is not."""
    if not math.isfinite(share):
        return "not a number"
    short = f"{100 * share:.1f}"
    if float(short) in (0.0, 100.0) and 0 < share < 1:
        short = f"{100 * share:.2f}"
        if float(short) in (0.0, 100.0):
            return "< 0.01 %" if share < 0.5 else "> 99.99 %"
    return f"{_trimmed(short)} %"


def percent_up(share: float) -> str:
    """An upper bound, rounded up: rounding must not make it look better."""
    if not math.isfinite(share):
        return "not a number"
    tenths = math.ceil(share * 1000 - 1e-9)
    return f"{_trimmed(f'{tenths / 10:.1f}')} %"


def exact_percent(share: float) -> str:
    """A share that somebody chose (alpha, a confidence), not rounded at all: 1.2 % is a stronger claim than 1.25 %."""
    return f"{(Decimal(repr(float(share))) * 100).normalize():f} %"


def _trimmed(text: str) -> str:
    return text.rstrip("0").rstrip(".")
