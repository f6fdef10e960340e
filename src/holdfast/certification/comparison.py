"""Two runs compared on the same prompts, and two methods compared over seeds.

Prompts within one seed measure the sampling of prompts; seeds measure the variation of training. They are never pooled:
prompts of several seeds are not independent, and an interval over all of them would be too narrow.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

from holdfast.certification.arguments import confidence_level, number
from holdfast.certification.binomial import tail
from holdfast.core.errors import DataError

WEAK_SEEDS = 5  # with 4 seeds the t interval is still 1.6 sd to each side


@dataclass(frozen=True)
class PromptComparison:
    """Violations of A and B on the same n prompts, within one seed; only_a and only_b are the discordant pairs b and c.

    `lower` and `upper` are Newcombe's paired interval (his method 10) of the difference, rate of A minus rate of B,
    `p_value` is of the exact two-sided McNemar test of "A and B violate equally often".
    """

    n: int
    both: int
    only_a: int
    only_b: int
    neither: int
    rate_a: float
    rate_b: float
    difference: float
    lower: float
    upper: float
    p_value: float
    confidence: float

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class SeedComparison:
    """Differences of rates (A minus B), one per seed, and the t interval of their mean."""

    differences: tuple[float, ...]
    mean: float
    deviation: float
    lower: float
    upper: float
    confidence: float
    caution: str | None

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "differences": list(self.differences), "seeds": len(self.differences)}


def compare_prompts(
    a_violated: Sequence[bool] | NDArray[np.bool_], b_violated: Sequence[bool] | NDArray[np.bool_],
    confidence: float = 0.95,
) -> PromptComparison:  # fmt: skip
    """Compares two runs prompt by prompt; entry i of both speaks of the same prompt."""
    a, b = _outcomes("A", a_violated), _outcomes("B", b_violated)
    if len(a) != len(b):
        what = f"A has {len(a)} prompts and B has {len(b)}, expected the same prompts"
        raise DataError(what, remedy="audit both on one data set")
    both, only_a, only_b = int((a & b).sum()), int((a & ~b).sum()), int((b & ~a).sum())
    table = (both, only_a, only_b, len(a) - both - only_a - only_b)
    lower, upper = newcombe_interval(*table, confidence)
    return PromptComparison(
        len(a), *table, rate_a=float(a.mean()), rate_b=float(b.mean()), difference=(only_a - only_b) / len(a),
        lower=lower, upper=upper, p_value=mcnemar_p_value(only_a, only_b), confidence=float(confidence),
    )  # fmt: skip


def mcnemar_p_value(only_a: int, only_b: int) -> float:
    """Returns min(1, 2 P(Bin(b + c, 1/2) <= min(b, c))): twice the smaller tail, capped at one.

    The binomial is symmetric, so this equals the usual exact test that adds up all outcomes as unlikely.
    """
    discordant = only_a + only_b
    return min(1.0, 2 * float(tail(min(only_a, only_b), discordant, 0.5))) if discordant else 1.0


def newcombe_interval(both: int, only_a: int, only_b: int, neither: int, confidence: float) -> tuple[float, float]:
    """Returns Newcombe's interval (1998, method 10) of the difference of two paired shares.

    The Wilson intervals of both shares are combined by squaring and adding, with their correlation phi (its numerator
    corrected for continuity). Exact enumeration finds its coverage nearer to the nominal from above than Tango's.
    """
    n = both + only_a + only_b + neither
    z = float(ndtri(1 - confidence_level(confidence, 2)))
    (a, below_a, above_a), (b, below_b, above_b) = (_wilson(both + only, n, z) for only in (only_a, only_b))
    product = float(both * neither - only_a * only_b)
    if product > 0:
        product = max(product - n / 2, 0.0)
    margins = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    phi = product / math.sqrt(margins) if margins else 0.0
    sides = (below_a, above_b), (above_a, below_b)
    low, high = (math.sqrt(max(x * x - 2 * phi * x * y + y * y, 0.0)) for x, y in sides)
    return max(a - b - low, -1.0), min(a - b + high, 1.0)


def compare_seeds(differences: Sequence[float], confidence: float = 0.95) -> SeedComparison:
    """Returns mean +- t_{S-1} sd / sqrt(S) of S seed-level paired differences, one number per seed."""
    if strange := [value for value in differences if not math.isfinite(number(value))]:
        what = f"a seed's difference is {strange[0]!r}, expected a finite number"
        raise DataError(what, remedy="pass one number per seed")
    values = np.array(differences, dtype=np.float64)
    seeds = len(values)
    if seeds < 2:
        raise DataError(
            f"{seeds} seed{'s' if seeds != 1 else ''}, expected at least 2 to see how training varies",
            remedy="train both methods with the same further seeds",
        )
    mean, deviation = float(values.mean()), float(values.std(ddof=1))
    half = float(stdtrit(seeds - 1, 1 - confidence_level(confidence, 2))) * deviation / math.sqrt(seeds)
    caution = None
    if seeds < WEAK_SEEDS:
        factor = half / deviation if deviation else math.nan
        width = f": the interval is {factor:.2g} standard deviations to each side" if deviation else ""
        caution = f"{seeds} seeds are weak evidence{width}; {WEAK_SEEDS} or more are advised"
    return SeedComparison(
        tuple(map(float, values)), mean, deviation, mean - half, mean + half, float(confidence), caution
    )


def _wilson(hits: int, n: int, z: float) -> tuple[float, float, float]:
    """A share and its distances to the lower and the upper end of its Wilson interval."""
    share, scale = hits / n, n + z * z
    half = z * math.sqrt(z * z + 4 * hits * (1 - share)) / (2 * scale)
    centre = (2 * hits + z * z) / (2 * scale)
    return share, share - (centre - half), centre + half - share


def _outcomes(name: str, violated: Sequence[bool] | NDArray[np.bool_]) -> NDArray[np.bool_]:
    values = np.asarray(violated)
    if values.ndim != 1 or values.size == 0 or values.dtype != np.bool_:
        what = f"{name}: outcomes of shape {values.shape} and type {values.dtype}, expected a vector of booleans"
        raise DataError(what, remedy="pass one truth value per prompt: whether it violates")
    return values
