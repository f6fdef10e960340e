"""One filtering problem reduced to its scalars: a few inner products, a K x K Gram matrix, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from holdfast.constraint.barrier import barrier_multipliers
from holdfast.constraint.gradients import ParameterSpace, Vector


@dataclass(frozen=True)
class FilterProblem:
    """The scalars of one filtering problem: all the mathematics happens on these."""

    inner: np.ndarray  # h_k . s_nom
    gram: np.ndarray  # h_k . M h_l
    spread: np.ndarray  # M h_k . M h_l, so that norm(correction)^2 = mu^T spread mu
    target: np.ndarray  # rate * v_k
    nominal_norm: float
    first_norm: float
    distance: float | None = None  # norm(theta - theta_0), where it was asked for

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
        size = self.correction_norm(mu) if mu.any() else 0.0
        return size / self.nominal_norm if self.nominal_norm else None

    @property
    def cosine(self) -> float | None:
        scale = self.nominal_norm * self.first_norm
        return float(self.inner[0]) / scale if scale > 0.0 else None

    def without_nominal(self) -> FilterProblem:
        """The same constraints with the task's step dropped."""
        return replace(self, inner=np.zeros_like(self.inner), nominal_norm=0.0)


def measure(
    space: ParameterSpace, gradients: Sequence[Vector], values: Sequence[float], nominal: Vector, *, rate: float,
    metric: Callable[[], Vector | None] = lambda: None, away: Vector | None = None,
) -> tuple[FilterProblem, Sequence[Vector]]:  # fmt: skip
    """The problem's inner products, and the directions `M h_k` of a correction; `away` is `theta - theta_0`.

    Where no constraint asks for a correction, `h_k . s_nom + rate v_k <= 0`, mu is zero whatever M is: nothing with M
    is computed then, which is most of the work. `metric` gives its diagonal, None for the identity.
    """
    count, far = len(gradients), [] if away is None else [(away, away)]
    pairs = [*((h, nominal) for h in gradients), (nominal, nominal), (gradients[0], gradients[0]), *far]
    found = np.asarray(space.dots(pairs))
    norms = [math.sqrt(x) if x >= 0 else math.nan for x in found[count:]]
    zero = np.zeros((count, count))
    problem = FilterProblem(found[:count], zero, zero, rate * np.asarray(values), *norms)
    if not problem.finite or not (problem.inner + problem.target > 0.0).any():
        return problem, []
    diagonal = metric()
    directions = gradients if diagonal is None else [list(torch._foreach_mul(diagonal, h)) for h in gradients]
    pairs = [(h, direction) for h in gradients for direction in directions]
    pairs += [(one, other) for one in directions for other in directions]
    # Of several constraints exactly: that two are parallel or opposed shows in the last digits (`constraint.dual`).
    gram, spread = np.asarray(space.dots(pairs, exact=count > 1)).reshape(2, count, count)
    return replace(problem, gram=gram, spread=spread), directions
