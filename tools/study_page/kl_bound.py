"""What a constraint in KL says of the mean, beside the harm that was measured under it.

The ramp begins to count at t = tau - 1/beta and is beta (D - t)_+ >= beta (D - t), so that

    mean_i (1 + beta (D_i - tau))_+ <= alpha    implies    mean_i D_i <= t + alpha/beta

True of any unit; of a KL, which is never negative, it bounds how far the model has moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tools.study_page.stored import steered

from holdfast_lab.tables.results import Result

RAMP, UNIT = "ramp", "kl_token"


def threshold(constraint: Mapping[str, float]) -> float:
    """t = tau - 1/beta: up to here every example may move at no cost; at or below 0 none may."""
    return constraint["tau"] - 1 / constraint["beta"]


def mean_bound(constraint: Mapping[str, float]) -> float:
    """t + alpha/beta, in nats per token."""
    return threshold(constraint) + constraint["alpha"] / constraint["beta"]


def bounded(results: Sequence[Result], defense: str) -> list[Result]:
    """The results of a defense that was steered by the ramp of a KL."""
    return [
        result
        for result in results
        if result.defense == defense
        and steered(result) == {"unit": UNIT, "majorizer": RAMP}
        and {"tau", "alpha", "beta"} <= result.constraint.keys()
    ]
