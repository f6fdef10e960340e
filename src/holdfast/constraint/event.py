"""What the filter did in one step."""

from dataclasses import dataclass
from enum import StrEnum


class Event(StrEnum):
    """What the filter did in one step.

    Attributes:
        INACTIVE: nothing: the nominal step already satisfies the barrier (an anchor may have pulled it back).
        ACTIVE: the step was corrected, and the barrier holds with equality.
        CAPPED: the correction was scaled down to the trust region; the barrier holds in part.
        INFEASIBLE: the barrier asks for a decrease of g, but grad g is zero: no step can give it.
        INFEASIBLE_START: the constraint does not hold for the unchanged model; allowed by the user.
        RESTORATION: the task step was dropped; only the constraint is being worked on.
        NONFINITE: a loss or gradient was not finite; the step was discarded.
    """

    INACTIVE = "inactive"
    ACTIVE = "active"
    CAPPED = "capped"
    INFEASIBLE = "infeasible"
    INFEASIBLE_START = "infeasible_start"
    RESTORATION = "restoration"
    NONFINITE = "nonfinite"


@dataclass(frozen=True)
class FilterEvent:
    """What one step of the filter did.

    Attributes:
        name: the case, see `Event`.
        values: `g_k + rho_k` as given; in a step that measures nothing, less what corrections have taken since.
        multipliers: lambda_k (gradient space) or mu_k (update space) as applied.
        residual: `max_k h_k . s + gamma v_k` of the corrected step (gradient space: of the direction, with kappa);
            at most zero, up to rounding, unless capped.
        correction_ratio: norm(correction) / norm(nominal); None when the nominal step is zero.
        cosine: cosine between the first constraint's gradient and the nominal step; None when either is zero.
        nonfinite: what was not finite, where the step was discarded for it.
        pulled: share of the distance from theta_0 that the step was pulled back to; 1 where it was not.
    """

    name: Event
    values: tuple[float, ...]
    multipliers: tuple[float, ...]
    residual: float | None = None
    correction_ratio: float | None = None
    cosine: float | None = None
    nonfinite: str = ""
    pulled: float = 1.0

    @property
    def corrected(self) -> bool:
        """Whether the nominal step was corrected; one that was only pulled back was not."""
        return self.name not in (Event.INACTIVE, Event.NONFINITE)
