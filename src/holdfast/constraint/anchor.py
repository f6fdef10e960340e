"""The distance from theta_0: averages that follow it, and the radius at which a constraint meets its ceiling.

A KL from theta_0 and its gradient are zero at theta_0. Along a training, to second order,

    g(theta) - f ~ r^2   and   grad g ~ r,      r = norm(theta - theta_0),

where f is g(theta_0) and what rounding adds as soon as anything has moved, whatever the distance (in bfloat16 a KL of
1e-4 to 5e-4 nats a token); the smallest value seen is taken for it. Above the ceiling it is no rounding, and f is
g(theta_0).

Averages over steps are of a smaller r while r grows: they are scaled to the r of today, all means with the same weights
over the steps j:

    v = f + (mean(v_j) - f) r^2 / mean(r_j^2),      h = mean(h_j) r / mean(r_j).

A step that ends outside of the radius at which a value would reach its ceiling c,

    R^2 = r^2 min_k (c_k - f_k) / (v_k - f_k),

is pulled back onto it, towards theta_0. That direction needs no gradient, and its effect is known. Where theta is
outside already, it goes `rate` of the way, as a violation is undone by the barrier: to r^2 - rate (r^2 - R^2).
Likelihoods and tails grow with another power of r: what R misses of them is seen in the next step's v.

The first steps are the longest in proportion, and nothing is known yet. So a step that ends GROWTH times as far out as
the last one that was verified is verified itself, where the caller can: the values are measured there, and the step is
pulled back to the radius that follows from them. So is a step that begins outside of the radius, by its estimates, at
most every AGAIN steps: estimates of few rows are noisy and late, and a verified one corrects them too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from holdfast.constraint.gradients import ParameterSpace, Vector
from holdfast.core.errors import NumericalError

GROWTH = 1.5  # times the distance that was verified last: further out a step is verified
AGAIN = 8  # an estimate above its ceiling has a step verified this many steps after the last verified one
MOVED = 1.1  # times the distance of the last measurement: further out the constraints are measured anew


Verify = Callable[[], Sequence[float]]
"""Measures the values `v_k` at the current parameters, without a gradient."""


class Limit(NamedTuple):
    """Of one constraint: the floor of its value, and the largest one that a step may be predicted to reach."""

    floor: float
    ceiling: float


def scaled(floor: float, mean: float, square: float, mean_square: float) -> float:
    """The average `mean` of values at mean squared distance `mean_square`, as it would be at `square`.

    One below the floor (likelihoods that improve) is left as it is: a fall is not known to go on.
    """
    return floor + (mean - floor) * square / mean_square if mean_square > 0.0 and mean > floor else mean


def radius(distance: float, values: Sequence[float], limits: Sequence[Limit], rate: float) -> float:
    """How far from theta_0 a step that begins at `distance`, with these values, may end; inf where nothing says so.

    A constraint that is violated at theta_0 has no radius, and at theta_0 none has.
    """
    largest = math.inf
    for value, limit in zip(values, limits, strict=True):
        room, grown = limit.ceiling - limit.floor, value - limit.floor
        if distance > 0.0 and room > 0.0 and grown > 0.0:
            square = distance**2 * room / grown
            if square < distance**2:
                square = distance**2 - rate * (distance**2 - square)
            largest = min(largest, math.sqrt(square))
    return largest


def _finite(values: Sequence[float]) -> Sequence[float]:
    """The values; refused where one is not a number: nothing says then how far back the step should go."""
    if bad := [k for k, value in enumerate(values) if not math.isfinite(value)]:
        raise NumericalError(
            f"where a step ended, the value of constraint {', '.join(map(str, bad))} is not finite (numbered from 0)",
            remedy="look for extreme safety examples, lower the learning rate, or go on from a checkpoint in float32",
        )
    return values


@dataclass
class Anchor:
    """theta_0, and how far from it theta is; part of a checkpoint.

    Without `pulls` only verified steps are pulled back; averages follow the distance all the same.
    """

    pulls: bool = True
    origin: Vector | None = None
    distance: float = 0.0  # norm(theta - theta_0), as the last step left it
    # by constraint:
    mean_distances: list[float] = field(default_factory=list)  # at which gradients were measured, with their weights
    measured_at: list[float] = field(default_factory=list)  # the last of them; 0 where the last step was discarded
    verified_at: float = 0.0  # the distance of the last step that was verified
    unverified: int = 0  # steps since then
    starts: list[float] = field(default_factory=list)  # the values at theta_0, where no limits are given

    def fresh(self, k: int) -> bool:
        """Whether theta is about as far from theta_0 as when constraint k was measured last; not at theta_0."""
        return bool(self.measured_at) and 0.0 < self.distance <= MOVED * self.measured_at[k]

    def drop(self, space: ParameterSpace, values: Sequence[float], limits: Sequence[Limit]) -> Sequence[Limit]:
        """Remember the first step's parameters and values; returns the limits of this step."""
        if self.origin is None:
            self.origin, self.starts = space.theta(), list(values)
            self.mean_distances, self.measured_at = [0.0] * len(values), [0.0] * len(values)
        return limits or [Limit(start, 0.0) for start in self.starts]

    def fold_distance(self, k: int, decay: float) -> None:
        """Take the distance into the average of constraint k, as a gradient measured at it is taken into its own."""
        self.mean_distances[k] += (1.0 - decay) * (self.distance - self.mean_distances[k])
        self.measured_at[k] = self.distance

    def away(self, theta: Vector) -> Vector:
        """`theta - theta_0`."""
        assert self.origin is not None
        return list(torch._foreach_sub(theta, self.origin))

    def pull(
        self, space: ParameterSpace, values: Sequence[float], limits: Sequence[Limit], rate: float,
        known: float | None, verify: Verify | None = None,
    ) -> float:  # fmt: skip
        """Bring theta back to the radius; returns the share of its distance from theta_0 that is left.

        `known`: `norm(theta - theta_0)`, where it is. `verify` measures the values where the step has ended.
        """
        assert self.origin is not None
        self.unverified += 1
        doubted = self.unverified >= AGAIN and radius(self.distance, values, limits, 1.0) < self.distance
        allowed = radius(self.distance, values, limits, rate) if self.pulls else math.inf
        if known is None:
            away = self.away(space.theta())
            known = math.sqrt(space.dots([(away, away)])[0])
        self.distance = known
        self._shorten(space, allowed)
        if verify is not None and (doubted or self.distance > GROWTH * self.verified_at):
            self._shorten(space, radius(self.distance, _finite(verify()), limits, 1.0))
            self.verified_at, self.unverified = self.distance, 0
        return self.distance / known if known > 0.0 else 1.0

    def _shorten(self, space: ParameterSpace, allowed: float) -> None:
        """Bring theta to this distance, where it is further out."""
        assert self.origin is not None
        if self.distance > allowed:
            space.pull(self.origin, 1.0 - allowed / self.distance)
            self.distance = allowed

    def state_dict(self, space: ParameterSpace) -> dict[str, object]:
        """Plain numbers and whole tensors (a collective call for sharded parameters)."""
        return {
            "origin": None if self.origin is None else space.full(space.split(self.origin)),
            "starts": list(self.starts),
            **{name: getattr(self, name) for name in ("pulls", "distance", "verified_at", "unverified")},
            "mean_distances": list(self.mean_distances),
            "measured_at": list(self.measured_at),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], space: ParameterSpace, *, pulls: bool) -> Anchor:
        """The inverse of `state_dict`."""
        origin = None if state["origin"] is None else space.join(space.scatter(state["origin"]))
        known, starts = dict(state), list(state["starts"])
        if "distances" in state:  # of earlier versions: one for all constraints, and at first none that was verified
            distance, mean_distance, measured_at, *verified_at = state["distances"]
            known |= {"distance": distance, "verified_at": (*verified_at, 0.0)[0], "unverified": 0}
            known |= {"mean_distances": [mean_distance] * len(starts), "measured_at": [measured_at] * len(starts)}
        names = ("distance", "verified_at", "unverified", "mean_distances", "measured_at")
        return cls(pulls, origin, **{name: known[name] for name in names}, starts=starts)
