"""A test that may be looked at after every prompt: the e-process.

H0: p >= alpha. For any p1 < alpha the factor (p1/alpha)^x ((1-p1)/(1-alpha))^(1-x) of one prompt (x = 1: regressed)
has expectation 1 at p = alpha and less above, so products of factors, and averages of products over p1, are
nonnegative supermartingales that start at 1. By Ville's inequality the average ever reaches 1/delta with probability
at most delta. It certifies there, whenever that happens; the count of looks does not matter.

One fixed model and prompts in an order that does not depend on their outcomes are assumed.
"""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from holdfast.certification.arguments import confidence_level, rate
from holdfast.certification.blocks import ProcessState
from holdfast.core.errors import DataError

# p1 / alpha: an average over alternatives needs no guess of the true rate and costs little against the best of them.
MIXTURE = np.linspace(0.02, 0.95, 50)
_BISECTIONS = 50  # 1 - 2^-50 is still below 1, where the factors end


class EProcess:
    """The running e-value of "at most alpha of the prompts regress", and its verdict.

    Attributes:
        n: prompts seen.
        regressions: how many of them regressed.
        certified_at: the number of prompts after which 1/delta was first reached, else None. Later prompts do not
            take the certificate back: the probability of ever reaching 1/delta was at most delta.
    """

    def __init__(self, alpha: float, confidence: float = 0.95, *, parts: int = 1) -> None:
        self.alpha = rate("alpha", alpha)
        self.level = confidence_level(confidence, parts)
        self.confidence = float(confidence)
        self.parts = int(parts)
        self.n = 0
        self.regressions = 0
        self.certified_at: int | None = None

    def update(self, regressed: bool) -> bool:
        return self.update_many([regressed])

    def update_many(self, regressed: Iterable[bool]) -> bool:
        """Takes in prompts in their order, looking after each; returns whether the claim is certified by now."""
        outcomes = np.array([_outcome(x) for x in regressed], dtype=np.int64)
        k = self.regressions + np.cumsum(outcomes)
        n = self.n + np.arange(1, len(outcomes) + 1)
        if self.certified_at is None and len(outcomes):
            reached = log_e_value(n, k, self.alpha) >= -math.log(self.level)
            if reached.any():
                self.certified_at = int(n[reached.argmax()])
        self.n += len(outcomes)
        self.regressions += int(outcomes.sum())
        return self.certified

    @property
    def e_value(self) -> float:
        """The average over p1 of the product of factors so far; inf beyond the range of a float."""
        log_e = float(log_e_value(self.n, self.regressions, self.alpha))
        return math.exp(log_e) if log_e < 700 else math.inf

    @property
    def certified(self) -> bool:
        """Whether the e-value has reached 1/delta at any look."""
        return self.certified_at is not None

    def upper_bound(self, *, kept: bool = True) -> float:
        """Returns a bound of the regressing share that holds at all looks at once with the stated confidence.

        U = sup {a : e-value of H0: p >= a is below 1/delta}. U < p would mean that the process at a = p has reached
        1/delta, which Ville bounds by delta. Each factor rises with a at fixed p1/a, so U is one crossing. Once
        alpha is certified the bound stays at most alpha, unless what was shown is not kept.
        """
        threshold = -math.log(self.level)
        low, high = 0.0, 1.0  # not rejected, rejected or the end
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            reached = float(log_e_value(self.n, self.regressions, middle)) >= threshold
            low, high = (low, middle) if reached else (middle, high)
        return min(high, self.alpha) if self.certified and kept else high

    def to_json(self) -> ProcessState:
        """Returns the counts and settings; the e-value follows from them, so nothing is rounded."""
        return {
            "alpha": self.alpha, "confidence": self.confidence, "parts": self.parts, "n": self.n,
            "regressions": self.regressions, "certified_at": self.certified_at,
        }  # fmt: skip


def log_e_value(n: ArrayLike, k: ArrayLike, alpha: float) -> NDArray[np.float64]:
    """Returns log mean_j (p_j/alpha)^k ((1-p_j)/(1-alpha))^(n-k), p_j = alpha `MIXTURE`_j, elementwise."""
    n, k = np.asarray(n, dtype=np.float64), np.asarray(k, dtype=np.float64)
    regressed = np.log(MIXTURE)
    held = np.log1p(alpha * (1 - MIXTURE) / (1 - alpha))  # (1 - c a) / (1 - a) without cancellation
    return log_mean_exp(k[..., None] * regressed + (n - k)[..., None] * held)


def log_mean_exp(logs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the log of the mean of exp(logs) over the last axis, without overflow."""
    largest = logs.max(axis=-1)
    return np.asarray(largest + np.log(np.exp(logs - largest[..., None]).mean(axis=-1)))


def _outcome(value: object) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    what = f"an outcome is {type(value).__name__} {value!r}, expected True (regressed) or False"
    raise DataError(what, remedy="pass one truth value per prompt")
