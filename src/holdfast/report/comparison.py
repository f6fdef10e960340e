"""Several runs side by side: what can be compared on the same prompts, and what cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from holdfast.certification.categories import adjusted
from holdfast.certification.comparison import PromptComparison, compare_prompts
from holdfast.report.evidence import Evidence, SafetyEvidence


@dataclass(frozen=True)
class Paired:
    """A run against the first one on the prompts of one safety set, or the reason why not."""

    first: str
    other: str
    role: str = ""
    found: PromptComparison | None = None
    adjusted_p: float = float("nan")
    several: bool = False
    reason: str = ""


def paired(runs: Sequence[Evidence], labels: Sequence[str]) -> list[Paired]:
    """Every later run against the first, per safety set; p-values of several comparisons are corrected (Holm)."""
    rows = []
    for one in runs[0].sets:
        for run, label in zip(runs[1:], labels[1:], strict=True):
            other = next((s for s in run.sets if s.name == one.name), None)
            rows.append(_pair(one, other, labels[0], label))
    p_values = {str(i): row.found.p_value for i, row in enumerate(rows) if row.found is not None}
    corrected = adjusted(p_values) if p_values else {}
    return [
        replace(row, adjusted_p=corrected.get(str(i), row.adjusted_p), several=len(p_values) > 1)
        for i, row in enumerate(rows)
    ]


def _pair(a: SafetyEvidence, b: SafetyEvidence | None, first: str, other: str) -> Paired:
    reason = _obstacle(a, b)
    if reason or b is None or a.table is None or b.table is None:
        return Paired(first, other, reason=reason)
    role = "monitor" if "monitor" in {*a.table.roles.tolist(), *b.table.roles.tolist()} else "audit"
    left, right = (_violated(one, role) for one in (a, b))
    without = [label for label, found in ((first, left), (other, right)) if not found]
    if without:
        has = "have" if len(without) > 1 else "has"
        return Paired(first, other, reason=f"{' and '.join(without)} {has} no {role} examples")
    if set(left) != set(right):
        return Paired(first, other, reason=f"their {role} examples are not the same")
    ids = sorted(left)
    found = compare_prompts(np.array([left[i] for i in ids]), np.array([right[i] for i in ids]))
    return Paired(first, other, role, found)


def _obstacle(a: SafetyEvidence, b: SafetyEvidence | None) -> str:
    """Why the two cannot be compared prompt by prompt; empty where they can."""
    if b is None:
        return "it has no safety set of that name"
    if a.table is None or b.table is None or a.limit is None or b.limit is None:
        return "audit.parquet is missing in one of them"
    if not a.limit.same_question(b.limit):
        return "tau or the unit differs"
    before = [
        one.audit.inner("before").text("sha256", "") if one.audit and "before" in one.audit else "" for one in (a, b)
    ]
    return "they start from different models" if before[0] != before[1] else ""


def _violated(one: SafetyEvidence, role: str) -> dict[str, bool]:
    assert one.table is not None
    mask = one.table.roles == role
    return {one.table.ids[i]: bool(one.table.violated[i]) for i in np.flatnonzero(mask)}
