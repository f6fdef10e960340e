"""A share of prompts in which a group of near-duplicates weighs at most c, whatever links its size to its failures.

Groups are drawn independently. Of the N prompts of a group F regress; it weighs w = min(N, c). H0: the weighted share
E[w F/N] / E[w] is at least alpha, that is E[Z] >= 0 with Z = w (F/N - alpha) <= (1 - alpha) c. For every lambda in
(0, 1 / ((1 - alpha) c)) the factor 1 - lambda Z is positive and has expectation at most 1 under H0, and so has

    E = mean over a fixed grid of lambda of prod_j (1 - lambda Z_j).

By Markov's inequality E reaches 1/delta with probability at most delta under H0, so min(1, 1/E) is a p-value. With
c = 1 and groups of one prompt, E is the e-value of `sequential`.
"""

import math
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from holdfast.certification.arguments import confidence_level, grid_alpha
from holdfast.certification.binomial import rounded, smallest_rate
from holdfast.certification.sequential import MIXTURE, log_mean_exp

# lambda (1 - alpha) c: the mixture of the e-process, where p1 = (1 - share) alpha.
SHARES = 1 - MIXTURE
_END = 36.0  # 1 - exp(-36) is the last alpha below 1, to float64


def log_e_value(
    sizes: NDArray[np.int64], failed: NDArray[np.int64], cap: int, alpha: float, counts: NDArray[np.int64] | None = None
) -> float:
    """Returns log E from the prompts of each group, those that regressed, c, and how many groups there are of each."""
    kinds, repeats = (np.stack((sizes, failed)), counts) if counts is not None else _tallied(sizes, failed)
    weight, share = np.minimum(kinds[0], cap) / cap, kinds[1] / kinds[0]
    lost = weight * (share - alpha) / (1 - alpha)  # Z / ((1 - alpha) c)
    return float(log_mean_exp(repeats @ np.log1p(-SHARES * lost[:, None])))


def p_value(sizes: NDArray[np.int64], failed: NDArray[np.int64], cap: int, alpha: float) -> float:
    """Returns min(1, 1/E) at alpha."""
    return float(_p_of(log_e_value(sizes, failed, cap, grid_alpha(alpha))))


def equal_groups(k: ArrayLike, n: ArrayLike, relative_weight: float, alpha: float) -> NDArray[np.float64]:
    """Returns min(1, 1/E) elementwise for n groups of one size of which k regress as a whole; w/c = relative_weight."""
    k, n = np.asarray(k, dtype=np.float64), np.asarray(n, dtype=np.float64)
    step = SHARES * relative_weight
    logs = k[..., None] * np.log1p(-step) + (n - k)[..., None] * np.log1p(step * alpha / (1 - alpha))
    return _p_of(log_mean_exp(logs))


def upper_bound(
    sizes: NDArray[np.int64], failed: NDArray[np.int64], cap: int, confidence: float = 0.95, *, parts: int = 1
) -> float:
    """Returns the smallest alpha of ten significant digits that these groups certify at level (1 - confidence) / parts.

    Z / ((1 - alpha) c) falls with alpha, so E rises with it and crosses 1 / level once.
    """
    from scipy.optimize import brentq  # half a second, for this test alone

    level, (kinds, repeats) = confidence_level(confidence, parts), _tallied(sizes, failed)
    log_e = partial(log_e_value, kinds[0], kinds[1], cap, counts=repeats)

    def above(x: float) -> float:
        """log(E level) at alpha = 1 - exp(-x), a scale on which it bends little."""
        return log_e(-math.expm1(-x)) + math.log(level)

    guess = 1.0 if above(_END) < 0 else -math.expm1(-brentq(above, 0.0, _END, xtol=1e-24, rtol=1e-13))
    return smallest_rate(guess, lambda alpha: float(_p_of(log_e(alpha))), level)


def _p_of(log_e: ArrayLike) -> NDArray[np.float64]:
    return rounded(np.exp(-np.maximum(log_e, 0.0)))


def _tallied(sizes: NDArray[np.int64], failed: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The different pairs (size, failed) in order, and how many groups have each: the order of groups has no say."""
    base = int(failed.max()) + 1
    kinds, repeats = np.unique(sizes * base + failed, return_counts=True)
    return np.stack((kinds // base, kinds % base)), repeats
