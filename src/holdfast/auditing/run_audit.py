"""The audit that a training run writes at its end, from the losses it has measured anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from holdfast.auditing.measure import Array, Measured
from holdfast.auditing.result import Audit
from holdfast.constraint.chance import ChanceConstraint
from holdfast.constraint.completion import CompletionLosses
from holdfast.core.provenance import commit, hardware, versions
from holdfast.records.audit_figures import UNITS, figures, violated
from holdfast.records.audit_folder import write_audit_folder


@dataclass(frozen=True)
class MeasuredRole:
    """One role's examples, and their losses at theta_0 and at the end.

    Attributes:
        kl: mean KL per token of every example; None when not measured.
    """

    ids: Sequence[str]
    categories: Sequence[str | None]
    truncated: Sequence[bool]
    before: CompletionLosses
    after: CompletionLosses
    kl: Tensor | None = None

    def columns(self, role: str, constraint: ChanceConstraint) -> dict[str, Any]:
        """The rows of the table."""
        measured = Measured(
            tokens=_array(self.before.tokens), first_tokens=_array(self.before.first_tokens),
            nll_before=_array(self.before.total), nll_after=_array(self.after.total),
            first_before=_array(self.before.first), first_after=_array(self.after.first),
            kl=None if self.kl is None else _array(self.kl),
        )  # fmt: skip
        units = {unit: None if unit == "kl_token" and self.kl is None else measured.degradation(unit) for unit in UNITS}
        return {
            "id": list(self.ids), "role": [role] * len(self.ids), "category": list(self.categories),
            "tokens": measured.tokens.astype(np.int32), "first_tokens": measured.first_tokens.astype(np.int32),
            "truncated": np.array(self.truncated, dtype=bool), "nll_before": measured.nll_before,
            "nll_after": measured.nll_after, "first_before": measured.first_before,
            "first_after": measured.first_after, **units,
            "violated": violated(measured.degradation(constraint.unit), constraint.tau),
        }  # fmt: skip


def _array(tensor: Tensor) -> Array:
    return np.asarray(tensor.detach().double().cpu().numpy())


def write_run_audit(
    folder: Path,
    roles: Mapping[str, MeasuredRole],
    constraint: ChanceConstraint,
    *,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    data: Mapping[str, Any],
    tokenizer_sha256: str,
    template_sha256: str,
    dtype: str,
    device: str,
    noise_floor: float | None,
    duplicates_dropped: int,
    seconds: float,
) -> Audit:
    """Write audit.parquet and then audit.json, with mode `training`; an audit of an earlier end is replaced.

    Args:
        folder: the run folder, or the folder of one of its safety sets.
        roles: `constraint` and, where there is one, `monitor`.
        constraint: the run's.
        before: `ref` and `sha256` of the model that entered training.
        after: of the model or adapter that came out.
        data: `source` and `sha256` of the safety data.
    """
    parts = [role.columns(name, constraint) for name, role in roles.items() if len(role.ids)]
    by_role = {part["role"][0]: {unit: part[unit] for unit in UNITS} for part in parts}
    values = {
        **figures(by_role, unit=constraint.unit, tau=constraint.tau, alpha=constraint.alpha),
        "unit": constraint.unit, "tau": constraint.tau, "alpha": constraint.alpha, "first_k": constraint.first_k,
        "noise_floor": noise_floor, "truncated": sum(int(part["truncated"].sum()) for part in parts),
        "duplicates_dropped": duplicates_dropped, "behaviour": None, "before": dict(before), "after": dict(after),
        "data": dict(data), "tokenizer_sha256": tokenizer_sha256, "template_sha256": template_sha256,
        "tokenizer": "same", "mode": "training", "dtype": dtype, "device": device, "versions": versions(),
        "commit": commit(), "hardware": hardware(), "seconds": round(seconds, 3), "binding": None,
    }  # fmt: skip
    write_audit_folder(folder, values, parts)
    return Audit.load(folder)
