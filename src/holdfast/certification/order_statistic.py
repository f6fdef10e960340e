"""The same test read as a quantile: the smallest tau that degradations certify is one of them.

For the exact binomial test it is D_(r), r the smallest rank with P(Bin(n, 1 - alpha) <= r - 1) >= 1 - delta: at most
n - r degradations exceed D_(r), so "D_(r) <= tau" is the verdict at tau, for every tau.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


def smallest_tau(degradations: NDArray[np.float64], certifies: Callable[[float], bool]) -> float | None:
    """Returns the smallest tau at which a test certifies; None where no finite degradation will do.

    Regressions fall as tau grows, and only at the degradations themselves; so the smallest tau is one of these, and
    bisection over them finds it for any test that one regression more never lets certify.
    """
    values = np.unique(degradations)
    finite = values[np.isfinite(values)].tolist()
    place = bisect_left(finite, True, key=certifies)
    return finite[place] if place < len(finite) else None
