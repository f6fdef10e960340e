"""One filtering problem reduced to its scalars: a few inner products, a K x K Gram matrix, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from holdfast.constraint.barrier import barrier_multipliers
from holdfast.constraint.gradients import ParameterSpace, Vector


@dataclass(frozen=True)
class FilterProblem:
    """The scalars of one filtering problem: all the mathematics happens on these.

    Attributes:
        inner: `h_k . s_nom`.
        gram: `h_k . M h_l`.
        spread: `M h_k . M h_l`, so that `norm(correction)^2 = mu^T spread mu`.
        target: `rate * v_k`.
    """

    inner: np.ndarray
    gram: np.ndarray
    spread: np.ndarray
    target: np.ndarray
    nominal_norm: float
    first_norm: float

    @property
    def finite(self) -> bool:
        parts = (self.inner, self.gram, self.spread, self.target, np.asarray(self.nominal_norm))
        return all(bool(np.isfinite(part).all()) for part in parts)

    def multipliers(self) -> np.ndarray:
        return barrier_multipliers(self.gram, self.inner + self.target)

    def residual(self, mu: np.ndarray) -> float:
        return float(np.max(self.inner - self.gram @ mu + self.target))

    def taken(self, mu: np.ndarray) -> list[float]:
        """What the corrected step takes from each constraint that asked for a correction: `max(0, -h_k . s)`."""
        return [float(x) for x in np.where(mu > 0.0, np.maximum(self.gram @ mu - self.inner, 0.0), 0.0)]

    def correction_norm(self, mu: np.ndarray) -> float:
        return math.sqrt(max(float(mu @ self.spread @ mu), np.finfo(float).tiny))

    def correction_ratio(self, mu: np.ndarray) -> float | None:
        if self.nominal_norm == 0.0:
            return None
        return self.correction_norm(mu) / self.nominal_norm if mu.any() else 0.0

    @property
    def cosine(self) -> float | None:
        scale = self.nominal_norm * self.first_norm
        return float(self.inner[0]) / scale if scale > 0.0 else None

    def without_nominal(self) -> FilterProblem:
        """The same constraints with the task's step dropped."""
        return replace(self, inner=np.zeros_like(self.inner), nominal_norm=0.0)


def measure(
    space: ParameterSpace,
    gradients: Sequence[Vector],
    values: Sequence[float],
    nominal: Vector,
    *,
    diagonal: Vector | None,
    rate: float,
) -> FilterProblem:
    """Every inner product of the problem, in one pass over the parameters."""
    hs = gradients
    scaled = hs if diagonal is None else [list(torch._foreach_mul(diagonal, h)) for h in hs]
    count = len(hs)
    pairs = [(h, nominal) for h in hs]
    pairs += [(hs[k], scaled[j]) for k in range(count) for j in range(count)]
    pairs += [(scaled[k], scaled[j]) for k in range(count) for j in range(count)]
    pairs += [(nominal, nominal), (hs[0], hs[0])]
    found = np.asarray(space.dots(pairs))
    square = count * count
    return FilterProblem(
        inner=found[:count],
        gram=found[count : count + square].reshape(count, count),
        spread=found[count + square : count + 2 * square].reshape(count, count),
        target=rate * np.asarray(values),
        nominal_norm=math.sqrt(found[-2]) if found[-2] >= 0 else math.nan,
        first_norm=math.sqrt(found[-1]) if found[-1] >= 0 else math.nan,
    )
