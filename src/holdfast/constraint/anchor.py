"""The distance from theta_0: averages that follow it, and the radius at which a constraint meets its ceiling.

A KL from theta_0 and its gradient are zero at theta_0. Along a training, to second order,

    g(theta) - g(theta_0) ~ r^2   and   grad g ~ r,      r = norm(theta - theta_0).

Averages over steps are of a smaller r while r grows, so that the first rise of g is over before they show it. They are
scaled to the r of today, all means with the same weights over the steps j:

    v = v(theta_0) + mean(v_j - v(theta_0)) r^2 / mean(r_j^2),      h = mean(h_j) r / mean(r_j).

A step that ends outside of the radius at which a value would reach its ceiling c,

    R^2 = r^2 min_k (c_k - v_k(theta_0)) / (v_k - v_k(theta_0)),

is pulled back onto it, towards theta_0. That direction needs no gradient, and its effect is known. Where theta is
outside already, it goes `rate` of the way, as a violation is undone by the barrier: to r^2 - rate (r^2 - R^2).

Likelihoods and tails grow with another power of r. For them R is exact where v = c, and what it misses is seen in the
next step's v.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Limit(NamedTuple):
    """Of one constraint: its value at theta_0, and the largest one that a step may be predicted to reach."""

    start: float
    ceiling: float


def scaled(start: float, mean: float, square: float, mean_square: float) -> float:
    """The average `mean` of values at mean squared distance `mean_square`, as it would be at `square`."""
    return start + (mean - start) * square / mean_square if mean_square > 0.0 else mean


def radius(distance: float, values: Sequence[float], limits: Sequence[Limit], rate: float) -> float:
    """How far from theta_0 a step that begins at `distance`, with these values, may end; inf where nothing says.

    A constraint that is violated at theta_0 has no radius.
    """
    largest = math.inf
    for value, limit in zip(values, limits, strict=True):
        room, grown = limit.ceiling - limit.start, value - limit.start
        if room > 0.0 and grown > 0.0:
            square = distance**2 * room / grown
            if square < distance**2:
                square = distance**2 - rate * (distance**2 - square)
            largest = min(largest, math.sqrt(square))
    return largest
