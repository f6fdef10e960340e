"""From measured windows, or the losses of a training run, to the files of an audit."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.auditing.behaviour import Behaviour
from holdfast.auditing.measure import Measured
from holdfast.auditing.partial_results import PartialResults
from holdfast.auditing.windows import Windows
from holdfast.constraint.chance import ChanceConstraint
from holdfast.constraint.feasibility import NOISE_MARGIN
from holdfast.core.hashing import sha256_json
from holdfast.core.provenance import commit, hardware, versions
from holdfast.core.units import UNITS
from holdfast.records.audit import Audit
from holdfast.records.audit_figures import violated
from holdfast.records.audit_folder import table_figures, write_audit_folder
from holdfast.scoring.completion import CompletionLosses

logger = logging.getLogger(__name__)

_LOSSES = ("tokens", "first_tokens", "nll_before", "nll_after", "first_before", "first_after")


def _write(
    folder: Path, parts: Iterable[dict[str, Any]], constraint: ChanceConstraint, facts: Mapping[str, Any],
    behaviour: Behaviour | None = None,
) -> Audit:  # fmt: skip
    """The table part by part, each of one role, then the summary: figures, and `facts` that are not in the table."""
    limit: dict[str, Any] = {name: getattr(constraint, name) for name in ("unit", "tau", "alpha")}

    def rows() -> Iterator[dict[str, Any]]:
        start = 0
        for part in parts:
            stop = start + len(part["id"])
            judged = {} if behaviour is None else behaviour.columns(start, stop)
            yield part | judged | {"violated": violated(part[constraint.unit], constraint.tau)}
            start = stop

    def summary(table: Any) -> dict[str, Any]:
        lost = int((~np.isfinite(table.column(constraint.unit).to_numpy())).sum())
        if lost:
            logger.warning("%d examples have no finite degradation; they count as violations unless it is -inf", lost)
        found = {"first_k": constraint.first_k, "commit": commit(), "hardware": hardware()}
        judged = {"behaviour": None if behaviour is None else behaviour.to_json()}
        return table_figures(table, **limit) | limit | found | judged | dict(facts)

    write_audit_folder(folder, summary, rows(), judged=behaviour is not None)
    return Audit.load(folder)


def write_audit(
    folder: Path, windows: Windows, parts: PartialResults, constraint: ChanceConstraint, behaviour: Behaviour | None,
    facts: Mapping[str, Any],
) -> Audit:  # fmt: skip
    """The files of an audit whose windows are all measured; `facts`: its binding, versions and time."""
    pair, streams, noise = windows.pair, windows.streams, parts.noise()
    if noise is not None and constraint.tau < NOISE_MARGIN * noise:
        logger.warning(
            "tau = %g is inside the numerical noise: the unchanged model moves by %.3g (%s), and tau should be at"
            " least %g times that; compute in float32 or raise tau",
            constraint.tau, noise, constraint.unit, NOISE_MARGIN,
        )  # fmt: skip
    names = ("both",) if parts.has("both", 0) else ("before", "after")
    dtypes = [parts.facts(name, number)["dtype"] for number in range(windows.count) for name in names]
    first, hashes = next(iter(streams.values())), {role: stream.sha256 for role, stream in streams.items()}
    data = {"source": first.name, "sha256": first.sha256, "file_sha256": first.file_sha256}
    if len(streams) > 1:
        data |= {"sha256": sha256_json(hashes), "file_sha256": None}
    known = {
        "noise_floor": noise, "duplicates_dropped": sum(stream.duplicates for stream in streams.values()),
        "before": pair.before.record, "after": pair.after.record, "data": data,
        "tokenizer_sha256": pair.tokenizers.tokenizer_sha256, "template_sha256": pair.tokenizers.template_sha256,
        "tokenizer": pair.tokenizers.choice, "mode": pair.mode, "dtype": " and ".join(dict.fromkeys(dtypes)),
        "device": str(pair.device),
    }  # fmt: skip
    rows = (_finished(parts, names, number, own=pair.tokenizers.own) for number in range(windows.count))
    return _write(folder, rows, constraint, known | dict(facts), behaviour)


def _finished(parts: PartialResults, names: Sequence[str], number: int, *, own: bool) -> dict[str, Any]:
    """One window of the finished table, with the degradations that are defined."""
    columns: dict[str, Any] = {"truncated": False}
    for read in (parts.read(name, number) for name in names):
        columns |= read | {"truncated": columns["truncated"] | read["truncated"]}
    kls = {name: columns.pop(name, None) for name in ("kl", "kl_first")}
    measured = Measured(**{name: columns[name] for name in _LOSSES}, **kls)
    if own:
        columns |= {"first_before": None, "first_after": None}
        return columns | dict.fromkeys(UNITS) | {"nll_sum": measured.degradation("nll_sum")}
    return columns | _degradations(measured)


def _degradations(measured: Measured) -> dict[str, Any]:
    missing = {unit for unit, kl in (("kl_token", measured.kl), ("kl_first", measured.kl_first)) if kl is None}
    return {unit: None if unit in missing else measured.degradation(unit) for unit in UNITS}


@dataclass(frozen=True)
class MeasuredRole:
    """One role's examples, their losses at theta_0 and at the end and, where measured, their KL."""

    ids: Sequence[str]
    categories: Sequence[str | None]
    truncated: Sequence[bool]
    before: CompletionLosses
    after: CompletionLosses
    kl: CompletionLosses | None = None

    def columns(self, role: str) -> dict[str, Any]:
        tensors = {"tokens": self.before.tokens, "first_tokens": self.before.first_tokens}
        tensors |= {"nll_before": self.before.total, "nll_after": self.after.total}
        tensors |= {"first_before": self.before.first, "first_after": self.after.first}
        if self.kl is not None:
            tensors |= {"kl": self.kl.per_token(), "kl_first": self.kl.per_first_token()}
        arrays: dict[str, Any] = {name: tensor.detach().double().cpu().numpy() for name, tensor in tensors.items()}
        counts = {name: arrays[name].astype(np.int32) for name in ("tokens", "first_tokens")}
        return {
            "id": list(self.ids), "role": [role] * len(self.ids), "category": list(self.categories),
            "truncated": np.array(self.truncated, dtype=bool), **{name: arrays[name] for name in _LOSSES}, **counts,
            **_degradations(Measured(**arrays)),
        }  # fmt: skip


def write_run_audit(
    folder: Path, roles: Mapping[str, MeasuredRole], constraint: ChanceConstraint, *, before: Mapping[str, Any],
    after: Mapping[str, Any], data: Mapping[str, Any], tokenizer_sha256: str, template_sha256: str, dtype: str,
    device: str, noise_floor: float | None, duplicates_dropped: int, seconds: float,
) -> Audit:  # fmt: skip
    """Write audit.parquet and then audit.json, with mode `training`; an audit of an earlier end is replaced.

    Args:
        folder: the run folder, or the folder of one of its safety sets.
        roles: `constraint` and, where there is one, `monitor`.
        before, after: `ref` and `sha256` of the model that entered training, and of what came out.
        data: `source` and `sha256` of the safety data.
    """
    facts = {
        "noise_floor": noise_floor, "duplicates_dropped": duplicates_dropped, "before": dict(before),
        "after": dict(after), "data": dict(data), "tokenizer_sha256": tokenizer_sha256,
        "template_sha256": template_sha256, "tokenizer": "same", "mode": "training", "dtype": dtype, "device": device,
        "versions": versions(), "seconds": round(seconds, 3), "binding": None,
    }  # fmt: skip
    return _write(folder, [role.columns(name) for name, role in roles.items() if len(role.ids)], constraint, facts)
