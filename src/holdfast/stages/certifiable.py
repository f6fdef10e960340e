"""Whether a run's certify share can certify at all: known from its size, before anything is trained."""

from __future__ import annotations

import math

from holdfast.certification.binomial import fewest_prompts, most_regressions
from holdfast.core.errors import ConfigError
from holdfast.core.percent import exact_percent
from holdfast.data.split_record import SplitRecord

CONFIDENCE = 0.95
"""What `holdfast certify` asks for unless told otherwise."""


def certify_note(record: SplitRecord, *, alpha: float, openings: int) -> str | None:
    """What to know about a certify share that is absent, too small, or just large enough; None when it has room.

    Args:
        record: of the split; near-duplicate prompts count as one, as they do in a certificate.
        alpha: the share of prompts that may regress.
        openings: how often the share may be opened; each opening gets an equal part of the allowed error.
    """
    n = record.clusters["certify"]
    if n == 0:
        return "no certify share: this run cannot be certified"
    allowed = most_regressions(n, alpha, CONFIDENCE, parts=openings)
    once = "" if n == record.counts["certify"] else " (near-duplicates count once)"
    if allowed is not None:
        return f"{n} certify prompts{once}: none may regress" if allowed == 0 else None
    over = f" over {openings} openings" if openings > 1 else ""
    claim = f"{n} certify prompts{once} cannot certify alpha {exact_percent(alpha)} at {exact_percent(CONFIDENCE)}"
    try:
        needed = fewest_prompts(alpha, CONFIDENCE, parts=openings)
    except ConfigError as error:
        return f"{claim} confidence{over}: {error.what}"
    share = record.fractions[2] if record.fractions is not None else 0
    total = f" (about {math.ceil(needed / share - 1e-9)} safety prompts at these fractions)" if share else ""
    return f"{claim} confidence{over}: {needed} are needed{total}"
