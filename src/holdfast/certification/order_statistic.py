"""The same test read as a quantile: the smallest tau that degradations certify is one of them.

For the exact binomial test it is D_(r), r the smallest rank with P(Bin(n, 1 - alpha) <= r - 1) >= 1 - delta: at most
n - r degradations exceed D_(r), so "D_(r) <= tau" is the verdict at tau, for every tau.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


def smallest_tau(degradations: NDArray[np.float64], certifies: Callable[[float], bool]) -> float | None:
    """Returns the smallest tau at which a test certifies; None where no finite degradation will do.

    Regressions fall as tau grows, and only at the degradations themselves; so the smallest tau is one of these, and
    bisection over them finds it for any test that one regression more never lets certify.
    """
    values = np.unique(degradations)
    values = values[np.isfinite(values)]
    low, high = -1, len(values)  # does not certify; certifies, or is the end
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if certifies(float(values[middle])) else (middle, high)
    return float(values[high]) if high < len(values) else None
