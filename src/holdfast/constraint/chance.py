"""The chance constraint: at most a fraction alpha of the safety examples may degrade by more than tau.

g = mean_i phi(D_i - tau) - alpha <= 0, where D_i is the degradation of safety example i relative to the model
as it entered fine-tuning, and phi is a majorizer of the indicator of z > 0.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Real

import torch
from torch import Tensor

from holdfast.constraint.majorizers import MAJORIZERS
from holdfast.core.errors import ConfigError, DataError, UnsupportedError
from holdfast.core.registry import nearest
from holdfast.core.units import FIRST_UNITS, KL_UNITS, UNITS, Unit
from holdfast.defaults import default

ON_POLICY = "on_policy"  # of audits and certificates alone
TAIL_SHARE = 0.9  # cvar's t stays below this share of tau, since beta = 1/(tau - t) diverges at tau
# 1 - 9.5 * 0.1 exceeds 0.05 by rounding alone; the boundary of the feasible start belongs to the user.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class ChanceConstraint:
    """At most a fraction `alpha` of the safety examples may degrade by more than `tau`.

    Attributes:
        tau: the largest acceptable degradation, in nats of `unit`.
        alpha: the tolerated share of examples beyond `tau`, in (0, 1).
        majorizer: a name of `holdfast ls majorizers`.
        beta: the majorizer's sharpness, 1/nats; for cvar it follows from `cvar_t` whatever is given.
        unit: how a degradation is measured.
        buffer: rho, added to g by the filter; below `alpha`, or nothing would satisfy g + rho <= 0.
        first_k: the number of completion tokens that `nll_first` and `kl_first` look at.
        cvar_t: cvar only: the tail's start t, in [0, 0.9 tau]; beta = 1/(tau - t).
        allow_infeasible_start: accept a constraint that the unchanged model already misses; where D is a KL, no
            model meets such a one.
        allow_tau_below_noise: accept a tau under five times the measured noise floor.
    """

    tau: float = default("constraint.tau")
    alpha: float = default("constraint.alpha")
    majorizer: str = default("constraint.majorizer")
    beta: float = default("constraint.beta")
    unit: Unit = default("constraint.unit")
    buffer: float = default("constraint.buffer")
    _: KW_ONLY
    first_k: int = default("constraint.first_k")
    cvar_t: float = 0.0
    allow_infeasible_start: bool = False
    allow_tau_below_noise: bool = False

    def __post_init__(self) -> None:
        _require("tau", self.tau, "tau >= 0", lower=0.0)
        _require("alpha", self.alpha, "0 < alpha < 1", above=0.0, below=1.0)
        _require("beta", self.beta, "beta > 0", above=0.0)
        _require("buffer", self.buffer, f"0 <= buffer < alpha = {self.alpha:g}", lower=0.0, below=self.alpha)
        _require("first_k", self.first_k, "first_k >= 1", lower=1.0)
        _ = MAJORIZERS[self.majorizer]  # an unknown name raises with the nearest
        if self.unit == ON_POLICY:
            raise UnsupportedError(
                f"constraint: unit {ON_POLICY!r} cannot be trained on: it judges generated replies, through which no "
                "gradient is computed",
                remedy="train on nll_first or nll_token; watch and certify on_policy with holdfast audit --judge and "
                "holdfast certify --judge",
            )
        if self.unit not in UNITS:
            raise ConfigError(f"constraint: unknown unit {self.unit!r}", remedy=nearest(str(self.unit), list(UNITS)))
        tail = TAIL_SHARE * self.tau if self.majorizer == "cvar" else 0.0
        _require("cvar_t", self.cvar_t, f"0 <= cvar_t <= {tail:g} (0 unless cvar)", lower=0.0, upper=tail)
        if self.majorizer == "cvar":
            _require("tau", self.tau, "tau > 0 (cvar puts its tail's start below tau)", above=0.0)
            object.__setattr__(self, "beta", 1 / (self.tau - self.cvar_t))

    def phi(self, degradation: Tensor) -> Tensor:
        """phi(D_i - tau), one value per example."""
        return MAJORIZERS[self.majorizer](_examples(degradation) - self.tau, self.beta)

    def value(self, degradation: Tensor) -> Tensor:
        """Returns g = mean phi(D - tau) - alpha, differentiable; entropic: log(mean phi / alpha) / beta, in nats.

        The buffer, a share as alpha is, is in neither.
        """
        if self.majorizer == "entropic":
            z = self.beta * (_examples(degradation) - self.tau)
            return (z.logsumexp(0) - math.log(self.alpha * len(z))) / self.beta
        return self.phi(degradation).mean() - self.alpha

    def violation_rate(self, degradation: Tensor) -> float:
        """The share of examples with D > tau; a NaN counts as a violation."""
        return float((~(_examples(degradation) <= self.tau)).double().mean())

    def cvar(self, degradation: Tensor) -> float:
        """Returns CVaR_{1-alpha}(D) in nats: the mean of the worst fraction alpha of the examples.

        Equal to min_t t + mean (D - t)_+ / alpha. When alpha n is not whole, the last example of the tail
        counts in part.
        """
        worst = _examples(degradation).detach().double().sort(descending=True).values
        tail = self.alpha * len(worst)
        rank = torch.arange(len(worst), dtype=torch.float64, device=worst.device)
        return float((worst * (tail - rank).clamp(0, 1)).sum() / tail)

    def start_value(self) -> float:
        """phi(-tau) - alpha: g at the unchanged model, but for entropic."""
        return float(self.phi(torch.zeros(1, dtype=torch.float64))) - self.alpha

    @property
    def feasible_start(self) -> bool:
        """Whether the unchanged model satisfies the buffered constraint: phi(-tau) <= alpha - rho."""
        return self.start_value() + self.buffer <= _ROUNDING

    @property
    def mean_bound(self) -> float | None:
        """The e of `mean D <= e`, which is g <= 0 where D is a KL and the ramp has no flat part; None elsewhere."""
        if self.unit not in KL_UNITS or self.majorizer != "ramp" or self.beta * self.tau > 1 + _ROUNDING:
            return None
        bound = self.threshold() + self.alpha / self.beta
        return bound if bound >= 0 else None  # no model has a mean below 0

    def threshold(self, beta: float | None = None) -> float:
        """t = tau - 1/beta, where the ramp starts to rise, at `beta` or the constraint's own."""
        return self.tau - 1 / (self.beta if beta is None else beta)

    def with_threshold(self, t: float) -> ChanceConstraint:
        """This cvar constraint with beta = 1/(tau - t), t clipped to [0, 0.9 tau]."""
        if self.majorizer != "cvar":
            raise UnsupportedError(
                f"constraint: with_threshold is defined for cvar, found {self.majorizer}",
                remedy="choose majorizer: cvar",
            )
        return replace(self, cvar_t=min(max(t, 0.0), TAIL_SHARE * self.tau))

    def describe(self) -> str:
        """One line for people."""
        quantity = "nats of KL per token" if self.unit in KL_UNITS else "nats per token"
        if self.unit == "nll_sum":
            quantity = "nats per completion"
        elif self.unit in FIRST_UNITS:
            quantity += f" over the first {self.first_k} tokens"
        sharpness = f"t={self.cvar_t:g}" if self.majorizer == "cvar" else f"beta={self.beta:g}"
        margin = f", buffer={self.buffer:g}" if self.buffer else ""
        share = (
            f"at most {100 * self.alpha:g}% of examples may degrade by more than {self.tau:g} {quantity} "
            f"({self.unit}), {self.majorizer} {sharpness}{margin}"
        )
        return share if self.mean_bound is None else f"mean {self.unit} at most {self.mean_bound:.3g}, so {share}"


def _require(
    name: str, value: object, expected: str, *, lower: float = -math.inf, above: float = -math.inf,
    upper: float = math.inf, below: float = math.inf,
) -> None:  # fmt: skip
    """Refuses anything but a finite number with lower <= value <= upper and above < value < below."""
    x = float(value) if isinstance(value, Real) else math.nan
    if not (math.isfinite(x) and lower <= x <= upper and above < x < below):
        what = f"constraint: {name} = {value!r}, expected a number with {expected}"
        raise ConfigError(what, remedy=f"set {name} so that {expected}")


def _examples(degradation: Tensor) -> Tensor:
    """`degradation`, if it is a non-empty vector of floats."""
    if degradation.ndim != 1 or degradation.numel() == 0 or not degradation.is_floating_point():
        raise DataError(
            f"constraint: degradations have shape {tuple(degradation.shape)} and dtype {degradation.dtype}, "
            "expected a non-empty float vector",
            remedy="pass one degradation per safety example, and at least one example",
        )
    return degradation
