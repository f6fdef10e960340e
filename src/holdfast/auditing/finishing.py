"""From measured windows to the files of an audit: `audit.parquet`, then `audit.json`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.auditing.pair import Pair
from holdfast.auditing.parts import Parts
from holdfast.auditing.windows import Windows, finished_columns
from holdfast.constraint.chance import NOISE_MARGIN, ChanceConstraint
from holdfast.core.hashing import sha256_json
from holdfast.core.provenance import commit, hardware
from holdfast.data.stream import ExampleStream
from holdfast.records.audit_figures import UNITS, figures, violated
from holdfast.records.audit_folder import write_audit_folder

logger = logging.getLogger(__name__)


def summary_of(
    pair: Pair, streams: Mapping[str, ExampleStream], constraint: ChanceConstraint, windows: Windows, parts: Parts
) -> dict[str, Any]:
    """The object of audit.json, without binding, versions, behaviour and time."""
    gathered: dict[str, dict[str, list[Any]]] = {role: {unit: [] for unit in UNITS} for role in streams}
    truncated, dtypes = 0, []
    for number in range(windows.count):
        columns = finished_columns(parts, number, own=pair.tokenizers.own)
        truncated += int(columns["truncated"].sum())
        for unit in UNITS:
            gathered[columns["role"][0]][unit].append(columns[unit])
        names = ("both",) if parts.has("both", number) else ("before", "after")
        dtypes += [parts.facts(name, number)["dtype"] for name in names]
    roles = {
        role: {unit: None if values[0] is None else np.concatenate(values) for unit, values in by_unit.items()}
        for role, by_unit in gathered.items()
    }
    noise = parts.noise()
    _warn(roles, constraint, noise)
    return {
        **figures(roles, unit=constraint.unit, tau=constraint.tau, alpha=constraint.alpha),
        "unit": constraint.unit, "tau": constraint.tau, "alpha": constraint.alpha, "first_k": constraint.first_k,
        "noise_floor": noise, "truncated": truncated,
        "duplicates_dropped": sum(stream.duplicates for stream in streams.values()),
        "before": {"ref": pair.before.ref, "sha256": pair.before.sha256},
        "after": {"ref": pair.after.ref, "sha256": pair.after.sha256}, "data": _data(streams),
        "tokenizer_sha256": pair.tokenizers.tokenizer_sha256, "template_sha256": pair.tokenizers.template_sha256,
        "tokenizer": pair.tokenizers.choice, "mode": pair.mode, "dtype": " and ".join(dict.fromkeys(dtypes)),
        "device": str(pair.device), "commit": commit(), "hardware": hardware(),
    }  # fmt: skip


def _data(streams: Mapping[str, ExampleStream]) -> dict[str, Any]:
    first = next(iter(streams.values()))
    if len(streams) == 1:
        return {"source": first.name, "sha256": first.sha256, "file_sha256": first.file_sha256}
    hashes = {role: stream.sha256 for role, stream in streams.items()}
    return {"source": first.name, "sha256": sha256_json(hashes), "file_sha256": None}


def _warn(roles: Mapping[str, Any], constraint: ChanceConstraint, noise: float | None) -> None:
    lost = sum(int((~np.isfinite(by_unit[constraint.unit])).sum()) for by_unit in roles.values())
    if lost:
        logger.warning("%d examples have no finite degradation; they count as violations unless it is -inf", lost)
    if noise is not None and constraint.tau < NOISE_MARGIN * noise:
        logger.warning(
            "tau = %g is inside the numerical noise: the unchanged model moves by %.3g (%s), and tau should be at"
            " least %g times that; compute in float32 or raise tau",
            constraint.tau, noise, constraint.unit, NOISE_MARGIN,
        )  # fmt: skip


def write_audit(
    folder: Path, values: dict[str, Any], windows: Windows, parts: Parts, constraint: ChanceConstraint, verdicts: Any
) -> None:
    """The table, then the summary: a folder with a summary is a finished audit."""
    harms = {} if verdicts is None else {side: verdicts.harm(side) for side in ("before", "after")}

    def rows() -> Iterable[dict[str, Any]]:
        start = 0
        for number in range(windows.count):
            columns = finished_columns(parts, number, own=windows.pair.tokenizers.own)
            stop = start + len(columns["id"])
            columns["violated"] = violated(columns[constraint.unit], constraint.tau)
            if verdicts is not None:
                columns["verdict_before"] = [str(v) for v in verdicts.verdicts_before[start:stop]]
                columns["verdict_after"] = [str(v) for v in verdicts.verdicts_after[start:stop]]
                for side, scores in harms.items():
                    columns[f"harm_{side}"] = None if scores is None else scores[start:stop]
            start = stop
            yield columns

    write_audit_folder(folder, values, rows(), judged=verdicts is not None)
