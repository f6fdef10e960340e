"""What the filter did in one step."""

from dataclasses import dataclass
from enum import StrEnum


class Event(StrEnum):
    """What the filter did in one step."""

    INACTIVE = "inactive"  # nothing: the nominal step satisfies the barrier (an anchor may have pulled it back)
    ACTIVE = "active"  # the step was corrected, and the barrier holds with equality
    CAPPED = "capped"  # the correction was scaled down to the trust region; the barrier holds in part
    INFEASIBLE = "infeasible"  # the barrier asks for a decrease of g, but grad g is zero: no step can give it
    INFEASIBLE_START = "infeasible_start"  # the constraint does not hold for the unchanged model; the user allowed it
    RESTORATION = "restoration"  # the task step was dropped; only the constraint is being worked on
    NONFINITE = "nonfinite"  # a loss or gradient was not finite; the step was discarded


@dataclass(frozen=True)
class FilterEvent:
    """What one step of the filter did; figures are None where they are not known."""

    name: Event
    values: tuple[float, ...]  # g_k + rho_k as given; in a step that measures nothing, less what corrections have taken
    multipliers: tuple[float, ...]  # lambda_k (gradient space) or mu_k (update space) as applied
    residual: float | None = None  # max_k h_k . s + gamma v_k of the corrected step or direction; <= 0 unless capped
    correction_ratio: float | None = None  # norm(correction) / norm(nominal)
    cosine: float | None = None  # between the first constraint's gradient and the nominal step
    nonfinite: str = ""  # what was not finite, where the step was discarded for it
    pulled: float = 1.0  # share of the distance from theta_0 that the step was pulled back to

    @property
    def corrected(self) -> bool:
        """Whether the nominal step was corrected; one that was only pulled back was not."""
        return self.name not in (Event.INACTIVE, Event.NONFINITE)
