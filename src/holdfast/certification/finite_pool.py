"""Certifying a known list of N prompts by a sample of n drawn without replacement.

The number K of bad prompts in the list is fixed; the number k of bad ones in the sample is hypergeometric. The claim
"at most alpha N are bad" breaks first at K0 = floor(alpha N) + 1, and P(Hyp(N, K, n) <= k) falls with K, so the test
certifies when P(Hyp(N, K0, n) <= k) <= delta. A sample of the whole list settles the claim without a bound.
"""

import math
from bisect import bisect_left

import numpy as np

from holdfast.certification.arguments import confidence_level, count, exact, rate, tally
from holdfast.certification.binomial import rounded
from holdfast.core.errors import ConfigError, DataError

LARGEST_POOL = 10_000_000  # the exact test holds a number for each


def p_value(regressions: int, n: int, pool: int, alpha: float) -> float:
    """Returns P(Hyp(pool, K0, n) <= regressions), K0 = floor(alpha pool) + 1."""
    k, n, pool = _sample(regressions, n, pool)
    return tail(k, n, pool, allowed_bad(pool, alpha) + 1)


def upper_count(regressions: int, n: int, pool: int, confidence: float = 0.95, *, parts: int = 1) -> int:
    """Returns the largest number of bad prompts in the list that the sample does not rule out at delta/parts."""
    k, n, pool = _sample(regressions, n, pool)
    level = confidence_level(confidence, parts)
    # k bad ones were seen and n - k good ones
    return k + bisect_left(range(k + 1, pool - (n - k) + 1), True, key=lambda bad: tail(k, n, pool, bad) <= level)


def fewest_prompts(pool: int, alpha: float, confidence: float = 0.95, *, parts: int = 1) -> int:
    """Returns the smallest sample that certifies the list when it holds no bad prompt; at most the whole list."""
    pool = count("pool", pool, least=1)
    level, bad = confidence_level(confidence, parts), allowed_bad(pool, alpha) + 1
    return 1 + bisect_left(range(1, pool), True, key=lambda n: tail(0, n, pool, bad) <= level)


def allowed_bad(pool: int, alpha: float) -> int:
    """Returns floor(alpha pool) in decimals: 0.29 of 100 is 29, which floats put below."""
    return math.floor(exact(rate("alpha", alpha)) * pool)


def tail(k: int, n: int, pool: int, bad: int) -> float:
    """Returns P(Hyp(pool, bad, n) <= k).

    The terms are built outwards from the largest by their ratios and divided by their sum: unlike differences of
    log-gammas, this keeps twelve digits for lists of a million.
    """
    first, last = max(0, n - (pool - bad)), min(n, bad)
    if k < first:
        return 0.0
    if k >= last:
        return 1.0
    i = np.arange(first, last, dtype=np.float64)
    ratio = (bad - i) * (n - i) / ((i + 1) * (pool - bad - n + i + 1))  # term(i + 1) / term(i)
    mode = int(np.searchsorted(-ratio, -1.0))  # ratios fall with i
    terms = np.concatenate((np.cumprod(1 / ratio[:mode][::-1])[::-1], [1.0], np.cumprod(ratio[mode:])))
    return float(rounded(np.asarray(terms[: k - first + 1].sum() / terms.sum())))


def _sample(regressions: object, n: object, pool: object) -> tuple[int, int, int]:
    k, size = tally(regressions, n)
    total = count("pool", pool, least=1)
    if total > LARGEST_POOL:
        what = f"a pool of {total} prompts, expected at most {LARGEST_POOL:,}"
        raise ConfigError(what, remedy="leave `pool` out: a sample of so large a list is one of an open source")
    if size > total:
        remedy = "count each prompt of the list once, or leave `pool` out when prompts come from an open source"
        raise DataError(f"n = {size} prompts from a list of {total}, expected n <= pool", remedy=remedy)
    return k, size, total
