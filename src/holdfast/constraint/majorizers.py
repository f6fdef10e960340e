"""Majorizers: functions phi >= 1{z > 0} that stand in for "this example got worse by more than tau".

With z_i = D_i - tau, mean_i phi(z_i) <= alpha implies that at most a fraction alpha of the z_i is positive.
One majorizer is one function `phi(z, beta)`; all are non-negative, non-decreasing, and equal 1 at z = 0. The decorator
also takes how sharp it must be for the unchanged model (every D_i = 0) to satisfy the constraint.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from holdfast.core.registry import Registry

Phi = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True)
class Majorizer:
    """A majorizer, by the name that users choose it by, and its feasible-start rule."""

    name: str
    phi: Phi  # elementwise and differentiable
    start: Callable[[float], float]  # level in (0, 1) -> the smallest s = beta * tau with phi(-tau) <= level

    def __call__(self, z: Tensor, beta: float) -> Tensor:
        return self.phi(z, beta)

    def smallest_beta(self, tau: float, level: float) -> float:
        """Returns the smallest beta with phi(-tau) <= level; inf at tau = 0, where phi is 1 for any beta."""
        return self.start(level) / tau if tau > 0 else math.inf


MAJORIZERS: Registry[Majorizer] = Registry("majorizer")


def majorizer(name: str, *, start: Callable[[float], float]) -> Callable[[Phi], Majorizer]:
    """Decorator that enters `phi(z, beta)` into `MAJORIZERS` under `name` with its feasible-start rule."""

    def enter(phi: Phi) -> Majorizer:
        return MAJORIZERS.register(name)(Majorizer(name, phi, start))

    return enter


@majorizer("ramp", start=lambda level: 1 - level)
def ramp(z: Tensor, beta: float) -> Tensor:
    """(1 + beta z)_+, the tightest convex majorizer of a given slope.

    With beta tau = 1 every example of the unchanged model sits on the kink z = -1/beta, so the derivative there decides
    the first step: relu gives 0, clamp would give 1.
    """
    return torch.relu(1 + beta * z)


@majorizer("log_ramp", start=lambda level: 1 - level)
def log_ramp(z: Tensor, beta: float) -> Tensor:
    """The ramp up to z = 0, 1 + log(1 + beta z) beyond: a lost example is pulled back, and counts little more.

    Its slope there is beta / (1 + beta z). Of a KL with beta tau = 1 that is 1 / D: an example at ten times the limit
    counts 3.3 times instead of ten.
    """
    rise = torch.relu(1 + beta * z)
    return torch.where(rise > 1, 1 + rise.clamp(min=1).log(), rise)


@majorizer("capped_ramp", start=lambda level: 1 - level)
def capped_ramp(z: Tensor, beta: float) -> Tensor:
    """min((1 + beta z)_+, 1), the ramp below tau and exact above; its derivative is the uncapped ramp's.

    The value counts a lost example once. The derivative of that would be 0 beyond tau: nothing would bring the example
    back. With the ramp's, lost examples are pulled like all others, and their recovery may pay for the rest in a step.
    """
    rise = torch.relu(1 + beta * z)
    return rise.clamp(max=1).detach() + (rise - rise.detach())


@majorizer("cvar", start=lambda level: 1 - level)
def cvar(z: Tensor, beta: float) -> Tensor:
    """The ramp with beta = 1/(tau - t), whose t follows the (1 - alpha) quantile of the degradations.

    mean phi <= alpha is t + mean (D - t)_+ / alpha <= tau; at the best t the left side is CVaR_{1-alpha}(D).
    """
    return torch.relu(1 + beta * z)


@majorizer("exponential", start=lambda level: -math.log(level))
def exponential(z: Tensor, beta: float) -> Tensor:
    """exp(beta z); overflows to inf for beta z above 88 (float32) or 709 (float64)."""
    return torch.exp(beta * z)


@majorizer("entropic", start=lambda level: -math.log(level))
def entropic(z: Tensor, beta: float) -> Tensor:
    """exp(beta z), whose constraint is taken in log form, in nats: log mean exp(beta z) / beta <= log(alpha) / beta.

    The same points are feasible; value and slopes do not explode: the slope of z_i is its share of sum exp(beta z).
    """
    return torch.exp(beta * z)


@majorizer("softplus", start=lambda level: -math.log(math.expm1(level * math.log(2))))
def softplus(z: Tensor, beta: float) -> Tensor:
    """log2(1 + exp(beta z)), a smooth ramp."""
    # Above the threshold torch returns its argument; at 40 both branches agree in float64, so the function
    # stays non-decreasing (the default of 20 has a downward jump of 2e-9).
    return functional.softplus(beta * z, threshold=40.0) / math.log(2)


@majorizer("squared_hinge", start=lambda level: 1 - math.sqrt(level))
def squared_hinge(z: Tensor, beta: float) -> Tensor:
    """(1 + beta z)_+^2, differentiable at the kink; outliers weigh more than with the ramp."""
    return torch.relu(1 + beta * z).square()


@majorizer("sigmoid", start=lambda level: math.log(2 / level - 1))
def sigmoid(z: Tensor, beta: float) -> Tensor:
    """2 sigmoid(beta z): bounded by 2, so that the gradient dies on large violators."""
    return 2 * torch.sigmoid(beta * z)
