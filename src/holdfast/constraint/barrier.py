"""The barrier: by how much a nominal step must be corrected so that it does not use up the constraint.

An applied step s must satisfy h . s <= -rate * value, with h = grad g and value = g + rho. The nearest such step to
s_nom in the metric of M^-1 is s_nom - mu M h, and this module computes mu: arithmetic on scalars.
"""

import math

import numpy as np
from numpy.typing import NDArray

from holdfast.constraint.dual import solve_unit
from holdfast.core.errors import ConfigError, NumericalError

Array = NDArray[np.float64]


def barrier_multiplier(*, inner: float, value: float, norm_sq: float, rate: float) -> float:
    """Returns max(0, inner + rate * value) / norm_sq, the multiplier of the correction.

    Args:
        inner: <grad g, nominal step>; in gradient space -<grad g, grad f>.
        value: g + rho, positive when the constraint is violated.
        norm_sq: <grad g, M grad g>, the squared norm of grad g in the metric of the correction.
        rate: gamma in update space, kappa in gradient space; at 0 the step may not increase g at all.

    It is 0.0 when the nominal step is fine, and inf when a decrease is needed and grad g is zero.
    """
    if not all(map(math.isfinite, (inner, value, norm_sq, rate))):
        raise NumericalError(
            f"barrier: inner={inner}, value={value}, norm_sq={norm_sq}, rate={rate}, expected finite numbers",
            remedy="discard this step; if it happens often, lower the learning rate or compute in float32",
        )
    if norm_sq < 0 or rate < 0:
        raise ConfigError(
            f"barrier: norm_sq={norm_sq}, rate={rate}, expected both >= 0",
            remedy="pass the squared norm of grad g and a rate in [0, 1] (gamma) or [0, 1/lr] (kappa)",
        )
    excess = inner + rate * value
    if excess <= 0:
        return 0.0
    return excess / norm_sq if norm_sq > 0 else math.inf


def barrier_multipliers(gram: Array, violation: Array, *, ridge: float = 0.0) -> Array:
    """Solves min_{mu >= 0} 1/2 mu^T (G + ridge I) mu - mu^T a, the filter for K constraints at once.

    The corrected step s_nom - M H^T mu is the nearest to s_nom with H s <= -rate * value. Rows are scaled to
    unit norm first, so that constraints with very different gradients are treated alike.

    Args:
        gram: G = H M H^T, K x K, where the rows of H are the constraints' gradients.
        violation: a = H s_nom + rate * value, length K.
        ridge: the slack's weight 1/omega; above 0, duplicated or contradictory constraints have one solution.

    Returns:
        The multipliers, length K. An entry is inf when no step satisfies that constraint: its row of H is
        zero and a > 0, or it contradicts another constraint.
    """
    gram, violation = _checked(gram, violation, ridge)
    gram = (gram + gram.T) / 2 + ridge * np.eye(len(violation))
    norm = np.sqrt(np.diagonal(gram))
    live = norm > 0
    mu = np.where(~live & (violation > 0), math.inf, 0.0)
    scale = norm[live]
    with np.errstate(over="ignore"):  # a tiny gradient may ask for an infinite step; the caller names it
        unit_gram = gram[np.ix_(live, live)] / scale[:, None] / scale
        mu[live] = solve_unit(unit_gram, violation[live] / scale) / scale
    return mu


def _checked(gram: Array, violation: Array, ridge: float) -> tuple[Array, Array]:
    gram, violation = (np.asarray(x, dtype=np.float64) for x in (gram, violation))
    if violation.ndim != 1 or gram.shape != (violation.size, violation.size):
        raise ConfigError(
            f"barrier: gram has shape {gram.shape} and violation {violation.shape}, expected (K, K) and (K,)",
            remedy="pass H M H^T and H s_nom + rate * value of the same constraints",
        )
    if not (np.isfinite(gram).all() and np.isfinite(violation).all() and math.isfinite(ridge)):
        bad = int((~np.isfinite(gram)).sum() + (~np.isfinite(violation)).sum())
        raise NumericalError(
            f"barrier: {bad} non-finite entries among {gram.size + violation.size}, ridge={ridge}",
            remedy="discard this step; if it happens often, lower the learning rate or compute in float32",
        )
    if ridge < 0 or (np.diagonal(gram) < 0).any():
        smallest = np.diagonal(gram).min(initial=0.0)
        raise ConfigError(
            f"barrier: ridge={ridge}, smallest squared norm {smallest}, expected both >= 0",
            remedy="pass a Gram matrix H M H^T with a positive metric M, and ridge >= 0",
        )
    return gram, violation
