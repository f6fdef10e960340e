"""How good a judge is: ranking, calibration and their figures by category.

z: logits, y: labels (1 = unsafe). h = max_c sigmoid(z_c) ranks as max_c z_c, so ranking needs no temperature.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import bisect
from scipy.special import expit
from scipy.stats import rankdata

BINS = 15
HOTTEST = 20.0  # temperatures are looked for between 1 / HOTTEST and HOTTEST
_Z95 = 1.959963984540054


def auroc(scores: ArrayLike, positive: ArrayLike) -> float | None:
    """P(score of a positive > score of a negative) + P(equal) / 2; None unless both kinds are present.

    By ranks: (sum of the positives' mid-ranks - m (m + 1) / 2) / (m n).
    """
    values, labels = _pair(scores, positive)
    m, n = int(labels.sum()), int((~labels).sum())
    return float((rankdata(values)[labels].sum() - m * (m + 1) / 2) / (m * n)) if m and n else None


def auroc_interval(scores: ArrayLike, positive: ArrayLike) -> tuple[float, float] | None:
    """95 % interval of the AUROC after DeLong: normal, cut to [0, 1]; None with fewer than two of a kind.

    Variance: var(v) / m + var(w) / n, v the share of negatives below each positive, w of positives above each negative.
    """
    values, labels = _pair(scores, positive)
    m, n = int(labels.sum()), int((~labels).sum())
    if min(m, n) < 2:
        return None
    overall = rankdata(values)
    above = (overall[labels] - rankdata(values[labels])) / n
    below = 1 - (overall[~labels] - rankdata(values[~labels])) / m
    centre = float(above.mean())
    spread = _Z95 * math.sqrt(float(above.var(ddof=1)) / m + float(below.var(ddof=1)) / n)
    return max(0.0, centre - spread), min(1.0, centre + spread)


def average_precision(scores: ArrayLike, positive: ArrayLike) -> float | None:
    """Sum over distinct thresholds of (gain in recall) * precision; None without a positive."""
    values, labels = _pair(scores, positive)
    if not labels.any():
        return None
    order = np.argsort(-values, kind="stable")
    hits = np.cumsum(labels[order])
    last = np.append(np.flatnonzero(np.diff(values[order])), len(values) - 1)  # the last of each run of equal scores
    recall = hits[last] / labels.sum()
    return float(np.sum(np.diff(recall, prepend=0.0) * hits[last] / (last + 1)))


def brier(probability: ArrayLike, positive: ArrayLike) -> float:
    """Mean of (p - y)^2."""
    values, labels = _pair(probability, positive)
    return float(np.mean((values - labels) ** 2))


def expected_calibration_error(probability: ArrayLike, positive: ArrayLike, bins: int = BINS) -> float:
    """Sum over bins of (share of the rows) * |mean p - mean y|; bins of equal width, open below, 0 in the first."""
    values, labels = _pair(probability, positive)
    place = np.clip(np.ceil(values * bins).astype(int) - 1, 0, bins - 1)
    gaps = np.bincount(place, weights=values - labels, minlength=bins)
    return float(np.abs(gaps).sum() / len(values))


def fit_temperature(logit: ArrayLike, positive: ArrayLike) -> float:
    """The T that minimises the mean of log(1 + exp(-(2y - 1) z / T)): bisection, since it is convex in 1 / T."""
    values, labels = _pair(logit, positive)
    signed = np.where(labels, values, -values)

    def slope(cold: float) -> float:
        return float(-np.mean(signed * expit(-cold * signed)))

    if slope(1 / HOTTEST) >= 0:
        return HOTTEST
    return 1 / HOTTEST if slope(HOTTEST) <= 0 else float(1 / bisect(slope, 1 / HOTTEST, HOTTEST, xtol=1e-15))


def judge_figures(
    logits: NDArray[np.floating], unsafe: Sequence[bool], categories: Sequence[Mapping[str, bool] | None],
    names: Sequence[str], *, temperature: float,
) -> dict[str, object]:  # fmt: skip
    """Everything that is reported of a judge on labelled rows, as JSON values; `logits` are rows x names.

    Rows whose categories are None, of which only the flag is known, are left out of the figures by category.
    """
    z = np.asarray(logits, dtype=np.float64)
    worst, labels = z.max(axis=1), np.asarray(unsafe, dtype=bool)
    calibrated = expit(worst / temperature)
    low, high = auroc_interval(worst, labels) or (None, None)
    known = [row for row, labelled in enumerate(categories) if labelled is not None]

    def of_category(column: int, name: str) -> dict[str, object]:
        held = np.array([bool((categories[row] or {}).get(name)) for row in known], dtype=bool)
        figures = {"auroc": auroc, "average_precision": average_precision}
        found = {key: figure(z[known, column], held) if known else None for key, figure in figures.items()}
        return {"support": int(held.sum()), **found}

    return {
        "n": len(labels), "unsafe": int(labels.sum()), "auroc": auroc(worst, labels), "auroc_low": low,
        "auroc_high": high, "average_precision": average_precision(worst, labels),
        **{f"accuracy_{t}": float(np.mean((calibrated > t) == labels)) for t in (0.4, 0.5)},
        **{f"flagged_{t}": float(np.mean(calibrated > t)) for t in (0.4, 0.5)},
        "temperature": temperature,
        **{key: {"brier": brier(p, labels), "ece": expected_calibration_error(p, labels)}
           for key, p in (("uncalibrated", expit(worst)), ("calibrated", calibrated))},
        "categories": {name: of_category(column, name) for column, name in enumerate(names)},
    }  # fmt: skip


def _pair(scores: ArrayLike, positive: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    values, labels = np.asarray(scores, dtype=np.float64), np.asarray(positive, dtype=bool)
    if values.ndim != 1 or values.shape != labels.shape or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"expected as many finite scores as labels and at least one, found {values.shape} scores")
    return values, labels
