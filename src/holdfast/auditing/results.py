"""The results of an audit on disk: of measured windows while it is unfinished, then of all, or of a training run.

What a killed audit continues from is written whole or not at all, and belongs to one binding: models, data, settings
and versions. A part's file is the sha256 of a parquet table (32 bytes), then the table: Arrow sees no flipped bit.
"""

from __future__ import annotations

import io
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.auditing.behaviour import Behaviour
from holdfast.auditing.measure import Measured
from holdfast.auditing.pair import Pair
from holdfast.constraint.chance import ChanceConstraint
from holdfast.constraint.feasibility import NOISE_MARGIN
from holdfast.core.errors import CheckpointError
from holdfast.core.files import parse_parquet, read_plain_file, write_bytes
from holdfast.core.hashing import sha256_json
from holdfast.core.provenance import commit, hardware, versions
from holdfast.core.sealed_json import read_sealed, write_sealed
from holdfast.core.units import UNITS
from holdfast.data.stream import ExampleStream
from holdfast.records.audit import Audit
from holdfast.records.audit_figures import AuditedData, AuditedModel, violated
from holdfast.records.audit_folder import table_figures, write_audit_folder
from holdfast.scoring.completion import CompletionLosses

if TYPE_CHECKING:
    from pyarrow import Table

logger = logging.getLogger(__name__)

FOLDER = ".audit-parts"
DIGEST = 32
_STRINGS = ("id", "role", "category")
_LOSSES = ("tokens", "first_tokens", "nll_before", "nll_after", "first_before", "first_after")


class PartialResults:
    """Measured windows of one audit, by pass (`both`, `before`, `after`) and number, and its noise floor."""

    def __init__(self, output: Path, binding: Mapping[str, object]) -> None:
        self.folder, self.sha256 = output / FOLDER, sha256_json(dict(binding))
        self._remedy = f"delete {self.folder} and audit again"
        self._noise, manifest = self.folder / "noise.json", self.folder / "manifest.json"
        try:
            same = not manifest.exists() or read_sealed(manifest)["binding_sha256"] == self.sha256
        except (CheckpointError, KeyError):
            same = False
        if not same:
            logger.warning("the unfinished audit in %s is of other models, data or settings: starting anew", output)
            shutil.rmtree(self.folder)
        if not manifest.exists():
            write_sealed(manifest, {"binding_sha256": self.sha256, "binding": dict(binding)})

    def has(self, name: str, window: int) -> bool:
        return self._path(name, window).exists()

    def write(self, name: str, window: int, columns: Mapping[str, object], facts: Mapping[str, object]) -> None:
        """Store a window's columns, and facts about how they were measured."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        typed = {key: pa.array(values, pa.string() if key in _STRINGS else None) for key, values in columns.items()}
        sink = io.BytesIO()
        pq.write_table(pa.table(typed, metadata={key: str(value) for key, value in facts.items()}), sink)
        write_bytes(self._path(name, window), sha256(sink.getvalue()).digest() + sink.getvalue())

    def read(self, name: str, window: int) -> dict[str, Any]:
        table = self._table(name, window)
        columns = {key: table[key] for key in table.column_names}
        return {k: c.to_pylist() if k in _STRINGS else np.asarray(c.to_numpy()) for k, c in columns.items()}

    def facts(self, name: str, window: int) -> dict[str, str]:
        metadata = self._table(name, window).schema.metadata or {}
        return {key.decode(): value.decode() for key, value in metadata.items()}

    def noise(self) -> float | None:
        if not self._noise.exists():
            return None
        return float(read_sealed(self._noise, remedy=self._remedy)["noise_floor"])

    def write_noise(self, value: float) -> None:
        write_sealed(self._noise, {"noise_floor": value})

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _table(self, name: str, window: int) -> Table:
        path = self._path(name, window)
        data = read_plain_file(path, remedy=self._remedy)
        if sha256(data[DIGEST:]).digest() != data[:DIGEST]:
            raise CheckpointError(f"{path} is damaged: its content does not match its checksum", remedy=self._remedy)
        return parse_parquet(data[DIGEST:])

    def _path(self, name: str, window: int) -> Path:
        return self.folder / f"{name}-{window:06d}.part"


def _write(
    folder: Path, parts: Iterable[dict[str, Any]], constraint: ChanceConstraint, facts: Mapping[str, object],
    behaviour: Behaviour | None = None,
) -> Audit:  # fmt: skip
    """The table part by part, each of one role, then the summary: figures, and `facts` that are not in the table."""
    limit: dict[str, Any] = {name: getattr(constraint, name) for name in ("unit", "tau", "alpha")}

    def rows() -> Iterator[dict[str, object]]:
        stop = 0
        for part in parts:
            start, stop = stop, stop + len(part["id"])
            judged = {} if behaviour is None else behaviour.columns(start, stop)
            yield part | judged | {"violated": violated(part[constraint.unit], constraint.tau)}

    def summary(table: Table) -> dict[str, object]:
        lost = int((~np.isfinite(table.column(constraint.unit).to_numpy())).sum())
        if lost:
            logger.warning("%d examples have no finite degradation; they count as violations unless it is -inf", lost)
        found = {"first_k": constraint.first_k, "commit": commit(), "hardware": hardware()}
        judged = {"behaviour": None if behaviour is None else behaviour.to_json()}
        return {**table_figures(table, **limit), **limit, **found, **judged, **facts}

    write_audit_folder(folder, summary, rows(), judged=behaviour is not None)
    return Audit.load(folder)


def write_audit(
    folder: Path, pair: Pair, streams: Mapping[str, ExampleStream], windows: int, parts: PartialResults,
    constraint: ChanceConstraint, behaviour: Behaviour | None, facts: Mapping[str, object],
) -> Audit:  # fmt: skip
    """The files of an audit whose windows are all measured; `facts`: its binding, versions and time."""
    noise = parts.noise()
    if noise is not None and constraint.tau < NOISE_MARGIN * noise:
        logger.warning(
            "tau = %g is inside the numerical noise: the unchanged model moves by %.3g (%s), and tau should be at"
            " least %g times that; compute in float32 or raise tau",
            constraint.tau, noise, constraint.unit, NOISE_MARGIN,
        )  # fmt: skip
    names = ("both",) if parts.has("both", 0) else ("before", "after")
    dtypes = [parts.facts(name, number)["dtype"] for number in range(windows) for name in names]
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
    rows = (_finished(parts, names, number, own=pair.tokenizers.own) for number in range(windows))
    return _write(folder, rows, constraint, known | dict(facts), behaviour)


def _finished(parts: PartialResults, names: Sequence[str], number: int, *, own: bool) -> dict[str, Any]:
    """One window of the finished table, with the degradations that are defined."""
    columns: dict[str, Any] = {"truncated": False}
    for read in (parts.read(name, number) for name in names):
        columns |= read | {"truncated": columns["truncated"] | read["truncated"]}
    kls = {name: columns.pop(name, None) for name in ("kl", "kl_first")}
    degradations = _degradations(Measured(**{name: columns[name] for name in _LOSSES}, **kls))
    if own:
        columns |= {"first_before": None, "first_after": None}
        degradations = dict.fromkeys(UNITS) | {"nll_sum": degradations["nll_sum"]}
    return columns | degradations


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
        was, now = self.before, self.after
        given = (was.tokens, was.first_tokens, was.total, now.total, was.first, now.first)
        tensors = dict(zip(_LOSSES, given, strict=True))
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
    folder: Path, roles: Mapping[str, MeasuredRole], constraint: ChanceConstraint, *, before: AuditedModel,
    after: AuditedModel, data: AuditedData, tokenizer_sha256: str, template_sha256: str, dtype: str,
    device: str, noise_floor: float | None, duplicates_dropped: int, seconds: float,
) -> Audit:  # fmt: skip
    """Write audit.parquet and then audit.json, with mode `training`; an audit of an earlier end is replaced.

    Args:
        folder: the run folder, or the folder of one of its safety sets.
        roles: `constraint` and, where there is one, `monitor`.
        before: `ref` and `sha256` of the model that entered training; `after`: of what came out.
        data: `source` and `sha256` of the safety data.
    """
    facts = {
        "noise_floor": noise_floor, "duplicates_dropped": duplicates_dropped, "before": dict(before),
        "after": dict(after), "data": dict(data), "tokenizer_sha256": tokenizer_sha256,
        "template_sha256": template_sha256, "tokenizer": "same", "mode": "training", "dtype": dtype, "device": device,
        "versions": versions(), "seconds": round(seconds, 3), "binding": None,
    }  # fmt: skip
    return _write(folder, [role.columns(name) for name, role in roles.items() if len(role.ids)], constraint, facts)
