"""By what a task's utility is measured: accuracy, or the loss where accuracy is at floor."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.tables.results import Result

ACCURACY, LOSS = "FA", "task_loss"
LOW = 0.25  # a model that is right more often than this is not at floor: it knew the task before


def utility_of(results: Sequence[Result]) -> str:
    """FA; the loss of the held-out targets where accuracy is at floor.

    At floor: the references' FA, interval included, is below a quarter, and no fine-tuned result's lies above it.
    """
    ends = [r.metrics[ACCURACY].high for r in results if r.is_reference and ACCURACY in r.metrics]
    floor = max((end for end in ends if end is not None), default=None)
    tuned = [r.metrics[ACCURACY].low for r in results if not r.is_reference and ACCURACY in r.metrics]
    lifted = any(low is not None and floor is not None and low > floor for low in tuned)
    there = any(LOSS in r.metrics for r in results if not r.is_reference)
    return ACCURACY if floor is None or floor >= LOW or lifted or not there else LOSS
