"""The dual of the barrier's quadratic programme, min_{mu >= 0} 1/2 mu^T G mu - mu^T a, with rows of unit length."""

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Array = NDArray[np.float64]
_RANK = 1e-12  # eigenvalues below this share of the largest are the rounding that duplicated constraints leave behind
_UNMET = 1e-6  # a constraint that misses by more than this, relative to its own terms, after the solve cannot be met


def solve_unit(gram: Array, violation: Array) -> Array:
    """Solves the dual for a unit-diagonal Gram matrix by growing the set of constraints taken into account.

    Starting from the violated constraints keeps those far from their boundary out of the arithmetic: a
    gradient that has decayed to almost nothing gives a = -1e18, whose rounding would drown the others.
    """
    mu = np.zeros_like(violation)
    working = violation > 0
    while True:
        mu[working] = _nnls(gram[np.ix_(working, working)], violation[working])
        unmet = violation - gram @ mu
        size = np.abs(violation) + np.abs(gram) @ mu
        entering = ~working & (unmet > _RANK * size)
        if not entering.any():
            return np.where(working & (unmet > _UNMET * size), math.inf, mu)
        working |= entering


def _nnls(gram: Array, violation: Array) -> Array:
    """Solves the dual as min_{mu >= 0} |A mu - b| with A^T A = G and A^T b = a."""
    top = np.abs(violation).max(initial=0.0)
    if top == 0:
        return np.zeros_like(violation)
    eigenvalues, vectors = np.linalg.eigh(gram)
    kept = eigenvalues > _RANK * eigenvalues[-1]
    root = np.sqrt(eigenvalues[kept])[:, None]
    factor = root * vectors[:, kept].T
    # The solver's stopping tolerance is absolute in b, hence the division by the largest entry.
    target = (vectors[:, kept].T @ (violation / top)) / root[:, 0]
    solution, _ = nnls(factor, target)
    return np.asarray(solution * top, dtype=np.float64)
