"""From measured windows, or the losses of a training run, to the files of an audit."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from holdfast.auditing.behaviour import Behaviour
from holdfast.auditing.measure import Measured
from holdfast.auditing.partial_results import PartialResults
from holdfast.auditing.windows import Windows, finished_columns
from holdfast.constraint.chance import ChanceConstraint
from holdfast.constraint.feasibility import NOISE_MARGIN
from holdfast.core.hashing import sha256_json
from holdfast.core.provenance import commit, hardware, versions
from holdfast.records.audit import Audit
from holdfast.records.audit_figures import UNITS, figures, violated
from holdfast.records.audit_folder import write_audit_folder
from holdfast.scoring.completion import CompletionLosses

logger = logging.getLogger(__name__)


def _figures(roles: Mapping[str, Mapping[str, Any]], constraint: ChanceConstraint) -> dict[str, Any]:
    limit = {name: getattr(constraint, name) for name in ("unit", "tau", "alpha")}
    return figures(roles, **limit) | limit | {"first_k": constraint.first_k}


def summary_of(constraint: ChanceConstraint, windows: Windows, parts: PartialResults) -> dict[str, Any]:
    """The object of audit.json, without binding, versions, behaviour and time."""
    pair, streams = windows.pair, windows.streams
    gathered: dict[str, dict[str, list[Any]]] = {role: {unit: [] for unit in UNITS} for role in streams}
    truncated, dtypes = 0, []
    for number in range(windows.count):
        columns = finished_columns(parts, number, own=pair.tokenizers.own)
        truncated += int(columns["truncated"].sum())
        for unit in UNITS:
            gathered[columns["role"][0]][unit].append(columns[unit])
        names = ("both",) if parts.has("both", number) else ("before", "after")
        dtypes += [parts.facts(name, number)["dtype"] for name in names]
    roles: dict[str, dict[str, Any]] = {
        role: {unit: None if values[0] is None else np.concatenate(values) for unit, values in by_unit.items()}
        for role, by_unit in gathered.items()
    }
    noise = parts.noise()
    lost = sum(int((~np.isfinite(by_unit[constraint.unit])).sum()) for by_unit in roles.values())
    if lost:
        logger.warning("%d examples have no finite degradation; they count as violations unless it is -inf", lost)
    if noise is not None and constraint.tau < NOISE_MARGIN * noise:
        logger.warning(
            "tau = %g is inside the numerical noise: the unchanged model moves by %.3g (%s), and tau should be at"
            " least %g times that; compute in float32 or raise tau",
            constraint.tau, noise, constraint.unit, NOISE_MARGIN,
        )  # fmt: skip
    first, hashes = next(iter(streams.values())), {role: stream.sha256 for role, stream in streams.items()}
    data = {"source": first.name, "sha256": first.sha256, "file_sha256": first.file_sha256}
    if len(streams) > 1:
        data |= {"sha256": sha256_json(hashes), "file_sha256": None}
    return {
        **_figures(roles, constraint),
        "noise_floor": noise, "truncated": truncated,
        "duplicates_dropped": sum(stream.duplicates for stream in streams.values()),
        "before": {"ref": pair.before.ref, "sha256": pair.before.sha256},
        "after": {"ref": pair.after.ref, "sha256": pair.after.sha256}, "data": data,
        "tokenizer_sha256": pair.tokenizers.tokenizer_sha256, "template_sha256": pair.tokenizers.template_sha256,
        "tokenizer": pair.tokenizers.choice, "mode": pair.mode, "dtype": " and ".join(dict.fromkeys(dtypes)),
        "device": str(pair.device), "commit": commit(), "hardware": hardware(),
    }  # fmt: skip


def write_audit(
    folder: Path, values: dict[str, Any], windows: Windows, parts: PartialResults, constraint: ChanceConstraint,
    behaviour: Behaviour | None,
) -> None:  # fmt: skip
    """The table, then the summary: a folder with a summary is a finished audit."""
    judged: dict[str, Any] = {}
    if behaviour is not None:
        judged |= {"verdict_before": behaviour.verdicts_before, "verdict_after": behaviour.verdicts_after}
        judged |= {f"harm_{side}": behaviour.harm(side) for side in ("before", "after")}

    def rows() -> Iterable[dict[str, Any]]:
        start = 0
        for number in range(windows.count):
            columns = finished_columns(parts, number, own=windows.pair.tokenizers.own)
            stop = start + len(columns["id"])
            columns["violated"] = violated(columns[constraint.unit], constraint.tau)
            columns |= {name: None if values is None else values[start:stop] for name, values in judged.items()}
            start = stop
            yield columns

    write_audit_folder(folder, values, rows(), judged=behaviour is not None)


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
        values = {"tokens": self.before.tokens, "first_tokens": self.before.first_tokens}
        values |= {"nll_before": self.before.total, "nll_after": self.after.total}
        values |= {"first_before": self.before.first, "first_after": self.after.first}
        values |= {} if self.kl is None else {"kl": self.kl}
        arrays: dict[str, Any] = {name: tensor.detach().double().cpu().numpy() for name, tensor in values.items()}
        measured = Measured(**arrays)
        units = {unit: None if unit == "kl_token" and self.kl is None else measured.degradation(unit) for unit in UNITS}
        return {
            "id": list(self.ids), "role": [role] * len(self.ids), "category": list(self.categories),
            "truncated": np.array(self.truncated, dtype=bool),
            **{name: getattr(measured, name) for name in values if name != "kl"}, **units,
            "tokens": measured.tokens.astype(np.int32), "first_tokens": measured.first_tokens.astype(np.int32),
            "violated": violated(measured.degradation(constraint.unit), constraint.tau),
        }  # fmt: skip


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
        **_figures(by_role, constraint),
        "noise_floor": noise_floor, "truncated": sum(int(part["truncated"].sum()) for part in parts),
        "duplicates_dropped": duplicates_dropped, "behaviour": None, "before": dict(before), "after": dict(after),
        "data": dict(data), "tokenizer_sha256": tokenizer_sha256, "template_sha256": template_sha256,
        "tokenizer": "same", "mode": "training", "dtype": dtype, "device": device, "versions": versions(),
        "commit": commit(), "hardware": hardware(), "seconds": round(seconds, 3), "binding": None,
    }  # fmt: skip
    write_audit_folder(folder, values, parts)
    return Audit.load(folder)
