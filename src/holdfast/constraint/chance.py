"""The chance constraint: at most a fraction alpha of the safety examples may degrade by more than tau.

g = mean_i phi(D_i - tau) - alpha <= 0, where D_i is the degradation of safety example i relative to the model
as it entered fine-tuning, and phi is a majorizer of the indicator of z > 0.
"""

from __future__ import annotations

import logging
import math
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Real
from typing import Literal, get_args

import torch
from torch import Tensor

from holdfast.constraint.majorizers import MAJORIZERS
from holdfast.core.errors import ConfigError, DataError, InfeasibleError, UnsupportedError
from holdfast.core.registry import nearest
from holdfast.defaults import default

logger = logging.getLogger(__name__)

Unit = Literal["nll_token", "nll_sum", "nll_first", "kl_token"]
UNITS: tuple[Unit, ...] = get_args(Unit)
ON_POLICY = "on_policy"  # of audits and certificates alone

TAIL_SHARE = 0.9  # cvar's t stays below this share of tau, since beta = 1/(tau - t) diverges at tau
FREE_KL = 0.02  # nats per token; at 0.05 a 135M model had lost its refusals (docs/results.md)
NOISE_MARGIN = 5.0  # tau must be at least this many times the measured noise floor
# 1 - 9.5 * 0.1 exceeds 0.05 by rounding alone; the boundary of the feasible start belongs to the user.
_ROUNDING = 1e-12
_ALLOW = "allow_infeasible_start: true to train towards feasibility"


@dataclass(frozen=True)
class ChanceConstraint:
    """At most a fraction `alpha` of the safety examples may degrade by more than `tau`.

    Attributes:
        tau: the largest acceptable degradation, in nats of `unit`.
        alpha: the tolerated share of examples beyond `tau`, in (0, 1).
        majorizer: a name in `MAJORIZERS`.
        beta: the majorizer's sharpness, 1/nats; for cvar it follows from `cvar_t` whatever is given.
        unit: how a degradation is measured.
        buffer: rho, added to g by the filter; below `alpha`, or nothing would satisfy g + rho <= 0.
        first_k: the number of completion tokens that `nll_first` looks at.
        cvar_t: cvar only: the tail's start t, in [0, 0.9 tau]; beta = 1/(tau - t).
        allow_infeasible_start: accept a constraint that the unchanged model already misses; in kl_token no model meets
            such a one.
        allow_tau_below_noise: accept a tau under five times the measured noise floor.
    """

    tau: float = default("constraint.tau")
    alpha: float = default("constraint.alpha")
    majorizer: str = default("constraint.majorizer")
    beta: float = default("constraint.beta")
    unit: Unit = default("constraint.unit_without_adapter")
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
        """Returns phi(D_i - tau), one value per example."""
        return MAJORIZERS[self.majorizer](_examples(degradation) - self.tau, self.beta)

    def value(self, degradation: Tensor) -> Tensor:
        """Returns g = mean phi(D - tau) - alpha, differentiable; the buffer is not in it."""
        return self.phi(degradation).mean() - self.alpha

    def violation_rate(self, degradation: Tensor) -> float:
        """Returns the share of examples with D > tau; a NaN counts as a violation."""
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

    def slack(self, degradation: Tensor) -> Tensor:
        """Returns the room left in nats, positive when feasible; differentiable.

        tau - (t + mean (D - t)_+ / alpha) with t = tau - 1/beta, for ramp and cvar; it is -g / (alpha beta).
        """
        self._only("slack", "ramp", "cvar")
        t = self.threshold()
        return self.tau - t - torch.relu(_examples(degradation) - t).mean() / self.alpha

    def entropic_value(self, degradation: Tensor) -> Tensor:
        """Returns the exponential's constraint in nats, with the sign of g and without its overflow.

        (1/beta) (log mean exp(beta (D - tau)) - log alpha) = (1/beta) log((g + alpha) / alpha).
        """
        self._only("entropic_value", "exponential")
        z = self.beta * (_examples(degradation) - self.tau)
        return (torch.logsumexp(z, dim=0) - math.log(len(z)) - math.log(self.alpha)) / self.beta

    def start_value(self) -> float:
        """Returns g at the unchanged model, phi(-tau) - alpha."""
        return float(self.phi(torch.zeros(1, dtype=torch.float64))) - self.alpha

    @property
    def feasible_start(self) -> bool:
        """Whether the unchanged model satisfies the buffered constraint: phi(-tau) <= alpha - rho."""
        return self.start_value() + self.buffer <= _ROUNDING

    @property
    def smallest_beta(self) -> float:
        """The smallest beta with a feasible start at this tau, alpha and buffer; inf at tau = 0."""
        return MAJORIZERS[self.majorizer].smallest_beta(self.tau, self.alpha - self.buffer)

    @property
    def unreachable(self) -> bool:
        """Whether no model meets it: a KL is never below 0, where phi is least and the unchanged model stands."""
        return self.unit == "kl_token" and not self.feasible_start

    def require_feasible_start(self) -> None:
        """Raises `InfeasibleError` when the start is infeasible, unless `allow_infeasible_start`."""
        if self.allow_infeasible_start and self.unreachable:
            logger.warning(
                "constraint: no model meets g + buffer <= 0: kl_token is never below 0, where phi = %.6g > alpha - "
                "buffer = %.6g already; a filter restores until it gives up (raise tau, or beta where tau > 0)",
                self.start_value() + self.alpha,
                self.alpha - self.buffer,
            )
        if self.feasible_start or self.allow_infeasible_start:
            return
        smallest = self.smallest_beta
        found = f"smallest feasible beta {_rounded_up(smallest)}" if smallest < math.inf else "no beta is feasible"
        change = f"beta >= {_rounded_up(smallest)} or a larger tau" if smallest < math.inf else "tau > 0"
        raise InfeasibleError(
            f"constraint: infeasible start: {self.majorizer} has "
            f"phi(-tau) = {self.start_value() + self.alpha:.6g}, expected "
            f"<= alpha - buffer = {self.alpha - self.buffer:.6g} "
            f"(tau={self.tau:g}, beta={self.beta:g}; {found})",
            remedy=f"set {change}" + ("" if self.unreachable else f", or {_ALLOW}"),
        )

    def require_tau_above_noise(self, noise_floor: float) -> None:
        """Raises `InfeasibleError` when tau < 5 * noise_floor, unless `allow_tau_below_noise`."""
        if self.tau >= NOISE_MARGIN * noise_floor or self.allow_tau_below_noise:
            return
        raise InfeasibleError(
            f"constraint: tau = {self.tau:g} is inside the numerical noise: the unchanged model moves by "
            f"{noise_floor:.3g} ({self.unit}), expected tau >= {NOISE_MARGIN:g} times that",
            remedy=f"set tau >= {_rounded_up(NOISE_MARGIN * noise_floor)}, compute in float32 (dtype: float32, --dtype "
            "float32), or set constraint.allow_tau_below_noise: true (--allow-tau-below-noise)",
        )

    @property
    def free(self) -> float:
        """The degradation that may cost nothing, in nats: phi is 0 up to t = tau - 1/beta where it has a flat part.

        cvar's t follows the degradations, so the largest that it may become counts.
        """
        if self.majorizer == "cvar":
            return TAIL_SHARE * self.tau
        return max(0.0, self.threshold()) if self.majorizer in ("ramp", "squared_hinge") else 0.0

    def warn_of_free_degradation(self, name: str) -> None:
        """Says so where every example may move further than is known to be harmless.

        A KL is never negative: with beta = 1/tau nothing of it is free, and the ramp bounds its mean by alpha tau.
        """
        if self.unit != "kl_token" or self.free <= FREE_KL:
            return
        ramp = f"{'majorizer: ramp and ' if self.majorizer == 'cvar' else ''}beta: {1 / self.tau:.4g}"
        logger.warning(
            "%s: kl_token may cost nothing up to %.3g nats per token (%s), so every example may move that far; 0.05 "
            "was enough for a small model to lose its refusals (docs/results.md). To count every movement set %s",
            name,
            self.free,
            "cvar's largest t" if self.majorizer == "cvar" else "tau - 1/beta",
            ramp,
        )

    def likelihood_note(self) -> str | None:
        """What a limit on the likelihood of whole replies leaves open; None in other units."""
        if self.unit not in ("nll_token", "nll_sum"):
            return None
        return (
            f"{self.unit} holds the likelihood of whole replies: one can stay as likely and no longer be said, as the "
            "refusals of a small model were (docs/protocol.md). kl_token also counts what the model would rather say"
        )

    def threshold(self, beta: float | None = None) -> float:
        """Returns t = tau - 1/beta, where the ramp starts to rise, at `beta` or the constraint's own."""
        return self.tau - 1 / (self.beta if beta is None else beta)

    def with_threshold(self, t: float) -> ChanceConstraint:
        """Returns this cvar constraint with beta = 1/(tau - t), t clipped to [0, 0.9 tau]."""
        self._only("with_threshold", "cvar")
        return replace(self, cvar_t=min(max(t, 0.0), TAIL_SHARE * self.tau))

    def describe(self) -> str:
        """Returns the constraint as one line for people."""
        quantity = {
            "nll_token": "nats per token",
            "nll_sum": "nats per completion",
            "nll_first": f"nats per token over the first {self.first_k} tokens",
            "kl_token": "nats of KL per token",
        }[self.unit]
        sharpness = f"t={self.cvar_t:g}" if self.majorizer == "cvar" else f"beta={self.beta:g}"
        margin = f", buffer={self.buffer:g}" if self.buffer else ""
        return (
            f"at most {100 * self.alpha:g}% of examples may degrade by more than {self.tau:g} {quantity} "
            f"({self.unit}), {self.majorizer} {sharpness}{margin}"
        )

    def _only(self, name: str, *majorizers: str) -> None:
        if self.majorizer not in majorizers:
            raise UnsupportedError(
                f"constraint: {name} is defined for {' and '.join(majorizers)}, found {self.majorizer}",
                remedy=f"choose majorizer: {majorizers[0]}, or use value(D)",
            )


def _require(
    name: str,
    value: object,
    expected: str,
    *,
    lower: float = -math.inf,
    above: float = -math.inf,
    upper: float = math.inf,
    below: float = math.inf,
) -> None:
    """Refuses anything but a finite number with lower <= value <= upper and above < value < below."""
    x = float(value) if isinstance(value, Real) else math.nan
    if not (math.isfinite(x) and lower <= x <= upper and above < x < below):
        raise ConfigError(
            f"constraint: {name} = {value!r}, expected a number with {expected}",
            remedy=f"set {name} so that {expected}",
        )


def _examples(degradation: Tensor) -> Tensor:
    """Returns `degradation` if it is a non-empty vector of floats."""
    if degradation.ndim != 1 or degradation.numel() == 0 or not degradation.is_floating_point():
        raise DataError(
            f"constraint: degradations have shape {tuple(degradation.shape)} and dtype {degradation.dtype}, "
            "expected a non-empty float vector",
            remedy="pass one degradation per safety example, and at least one example",
        )
    return degradation


def _rounded_up(x: float) -> str:
    """Formats x with four significant digits, never below x, so that a printed bound satisfies itself."""
    if not (0 < x < math.inf):
        return f"{x:g}"
    step = 10.0 ** (math.floor(math.log10(x)) - 3)
    # The allowance is rounding only: without it 9.5 would print as 9.501.
    return f"{math.ceil(x / step - 1e-11) * step:.4g}"
