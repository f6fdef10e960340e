"""Whether a constraint can be met, and what it leaves open: the start, numerical noise, free movement, likelihood."""

import logging
import math
from dataclasses import replace

from holdfast.constraint.chance import TAIL_SHARE, ChanceConstraint
from holdfast.constraint.majorizers import MAJORIZERS
from holdfast.core.errors import InfeasibleError
from holdfast.core.units import KL_UNITS

logger = logging.getLogger(__name__)

FREE_KL = 0.02  # nats per token; at 0.05 a 135M model had lost its refusals (docs/results.md)
FLAT = ("ramp", "capped_ramp", "log_ramp", "squared_hinge")  # majorizers that are 0 up to tau - 1/beta
NOISE_MARGIN = 5.0  # tau must be at least this many times the measured noise floor


def smallest_beta(c: ChanceConstraint) -> float:
    """The smallest beta with a feasible start at this tau, alpha and buffer; inf at tau = 0."""
    return MAJORIZERS[c.majorizer].smallest_beta(c.tau, c.alpha - c.buffer)


def unreachable(c: ChanceConstraint) -> bool:
    """Whether no model meets it: a KL is never below 0, where phi is least and the unchanged model stands."""
    return c.unit in KL_UNITS and not c.feasible_start


def require_room(start: float, limit: float, margin: float, reserve: float, *, allowed: bool) -> None:
    """Raises `InfeasibleError` where a reserve leaves nothing of the limit, or too little for the unchanged model.

    Args:
        start: what the unchanged model has of the limit.
        margin: buffer and reserve together.
        allowed: whether the start misses the limit without a reserve too, which was allowed then.
    """
    if not reserve or (margin < limit and (allowed or start <= limit - margin + 1e-12)):
        return
    raise InfeasibleError(
        f"reserve {reserve:g} makes the start infeasible: the unchanged model has {start:.3g} of the limit {limit:g}, "
        f"and buffer and reserve leave {max(limit - margin, 0.0):.3g}",
        remedy="lower defense.reserve, or raise constraint.beta",
    )


def require_feasible_start(c: ChanceConstraint, reserve: float = 0.0) -> None:
    """Raises `InfeasibleError` when the start is infeasible, unless `allow_infeasible_start`.

    `reserve` is the share of alpha that a filter leaves unused.
    """
    start = c.start_value() + c.alpha
    require_room(start, c.alpha, c.buffer + reserve * c.alpha, reserve, allowed=not c.feasible_start)
    if c.allow_infeasible_start and unreachable(c):
        logger.warning(
            "constraint: no model meets g + buffer <= 0: a KL is never below 0, where phi = %.6g > alpha - "
            "buffer = %.6g already; a filter restores until it gives up (raise tau, or beta where tau > 0)",
            start, c.alpha - c.buffer,
        )  # fmt: skip
    if c.feasible_start or c.allow_infeasible_start:
        return
    beta = smallest_beta(c)
    found = f"smallest feasible beta {_rounded_up(beta)}" if beta < math.inf else "no beta is feasible"
    change = f"beta >= {_rounded_up(beta)} or a larger tau" if beta < math.inf else "tau > 0"
    allow = "" if unreachable(c) else ", or allow_infeasible_start: true to train towards feasibility"
    raise InfeasibleError(
        f"constraint: infeasible start: {c.majorizer} has phi(-tau) = {start:.6g}, expected "
        f"<= alpha - buffer = {c.alpha - c.buffer:.6g} (tau={c.tau:g}, beta={c.beta:g}; {found})",
        remedy=f"set {change}{allow}",
    )


def require_tau_above_noise(c: ChanceConstraint, noise_floor: float) -> None:
    """Raises `InfeasibleError` when tau < 5 * noise_floor, unless `allow_tau_below_noise`."""
    if c.tau >= NOISE_MARGIN * noise_floor or c.allow_tau_below_noise:
        return
    raise InfeasibleError(
        f"constraint: tau = {c.tau:g} is inside the numerical noise: the unchanged model moves by "
        f"{noise_floor:.3g} ({c.unit}), expected tau >= {NOISE_MARGIN:g} times that",
        remedy=f"set tau >= {_rounded_up(NOISE_MARGIN * noise_floor)} with beta = 1/tau and unit: {c.unit}, compute in "
        "float32 (dtype: float32, --dtype float32; in Python a float32 model and bf16=False), or set "
        "constraint.allow_tau_below_noise: true (--allow-tau-below-noise)",
    )


def warn_of_noise(c: ChanceConstraint, noise_floor: float, name: str) -> None:
    """Says so where rounding moves a row by more than all rows may move on average."""
    # Rounding stays below tau, where these are the ramp.
    bound = replace(c, majorizer="ramp").mean_bound if c.majorizer in ("capped_ramp", "log_ramp") else c.mean_bound
    if bound is not None and noise_floor > bound:
        logger.warning(
            "%s: rounding moves an example by up to %.2g (%s), and on average they may move by %.2g: rounding alone "
            "can use up the limit; dtype: float32 avoids that",
            name, noise_floor, c.unit, bound,
        )  # fmt: skip


def free_degradation(c: ChanceConstraint) -> float:
    """The degradation that may cost nothing, in nats: phi is 0 up to t = tau - 1/beta where it has a flat part.

    cvar's t follows the degradations, so the largest that it may become counts.
    """
    if c.majorizer == "cvar":
        return TAIL_SHARE * c.tau
    return max(0.0, c.threshold()) if c.majorizer in FLAT else 0.0


def warn_of_free_degradation(c: ChanceConstraint, name: str) -> None:
    """Says so where every example may move further than is known to be harmless.

    A KL is never negative: with beta = 1/tau nothing of it is free, and the ramp bounds its mean by alpha tau.
    """
    free = free_degradation(c)
    if c.unit not in KL_UNITS or free <= FREE_KL:
        return
    ramp = f"{'majorizer: ramp and ' if c.majorizer == 'cvar' else ''}beta: {1 / c.tau:.4g}"
    logger.warning(
        "%s: %s may cost nothing up to %.3g nats per token (%s), so every example may move that far; 0.05 "
        "was enough for a small model to lose its refusals (docs/results.md). To count every movement set %s",
        name, c.unit, free, "cvar's largest t" if c.majorizer == "cvar" else "tau - 1/beta", ramp,
    )  # fmt: skip


def likelihood_note(c: ChanceConstraint) -> str | None:
    """What a limit on the likelihood of whole replies leaves open; None in other units."""
    if c.unit not in ("nll_token", "nll_sum"):
        return None
    return (
        f"{c.unit} holds the likelihood of whole replies: one can stay as likely and no longer be said, as the "
        "refusals of a small model were (docs/protocol.md). kl_token also counts what the model would rather say"
    )


def _rounded_up(x: float) -> str:
    """Formats x with four significant digits, never below x, so that a printed bound satisfies itself."""
    if not (0 < x < math.inf):
        return f"{x:g}"
    step = 10.0 ** (math.floor(math.log10(x)) - 3)
    # The allowance is rounding only: without it 9.5 would print as 9.501.
    return f"{math.ceil(x / step - 1e-11) * step:.4g}"
