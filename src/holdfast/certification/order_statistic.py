"""The same test read as a quantile: which tau is certified at the user's alpha.

D_(r), the r-th smallest of n degradations, bounds the (1 - alpha) quantile with confidence 1 - delta when
P(Bin(n, 1 - alpha) <= r - 1) >= 1 - delta. At most n - r degradations exceed D_(r), so "D_(r) <= tau" is the
binomial test's verdict at tau, for every tau.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.certification.arguments import confidence_level, tally
from holdfast.certification.binomial import most_regressions
from holdfast.core.errors import DataError


def rank(n: int, alpha: float, confidence: float = 0.95, *, parts: int = 1) -> int | None:
    """Returns the smallest r with P(Bin(n, 1 - alpha) <= r - 1) >= 1 - delta/parts; None when n is too small.

    P(Bin(n, 1-alpha) <= r-1) = 1 - P(Bin(n, alpha) <= n-r), so r = n minus the most regressions that certify.
    """
    allowed = most_regressions(n, alpha, confidence, parts=parts)
    return None if allowed is None else n - allowed


def certified_tau(
    degradations: Sequence[float] | NDArray[Any], alpha: float, confidence: float = 0.95, *, parts: int = 1
) -> float | None:
    """Returns D_(r), the smallest tau that these degradations certify; None when no finite tau is certified.

    A NaN counts as infinitely degraded.
    """
    values = np.asarray(degradations, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise DataError(
            f"degradations have shape {values.shape}, expected a non-empty vector",
            remedy="pass one degradation per prompt",
        )
    r = rank(values.size, alpha, confidence, parts=parts)
    if r is None:
        return None
    tau = float(np.sort(np.where(np.isnan(values), math.inf, values))[r - 1])
    return tau if math.isfinite(tau) else None


def dkw_halfwidth(n: int, confidence: float = 0.95) -> float:
    """Returns sqrt(ln(2/delta) / (2n)): the whole empirical distribution is this close to the true one.

    The Dvoretzky-Kiefer-Wolfowitz band holds for all tau at once, which a certificate at one tau does not.
    """
    _, n = tally(0, n)
    return math.sqrt(math.log(2 / confidence_level(confidence)) / (2 * n))
