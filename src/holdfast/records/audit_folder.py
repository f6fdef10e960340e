"""The two files of an audit: `audit.parquet`, then `audit.json`, which holds the table's sha256 and its own.

`audit.json` is the root: a folder without it holds no finished audit. Every figure in it that follows from the table
is computed again when it is read:

| in audit.json                                     | from the columns                                     |
|---------------------------------------------------|------------------------------------------------------|
| n, violations, rates, bounds, quantiles, cvar ... | degradations by role, with tau and alpha             |
| within                                            | the rate of every role <= alpha                      |
| truncated                                         | the number of true values                            |
| behaviour                                         | verdicts and harm of both sides                      |

and in the table itself: nll_sum = nll_after - nll_before, nll_token = nll_sum / tokens, nll_first likewise over the
first tokens, violated = not (D <= tau), ids that occur once. Models, data, settings and versions are not in the table:
that they were not replaced together with every checksum, only a signature or a hash kept elsewhere can tell.

The table has one row an example, in the order of the data, without any of its text:

| column                                            | type            |                                               |
|---------------------------------------------------|-----------------|-----------------------------------------------|
| id                                                | string          | hash of prompt and completion                 |
| role                                              | string          | `audit`, `constraint` or `monitor`            |
| category                                          | string or null  | the data's own label                          |
| tokens, first_tokens                              | int32           | scored tokens; of these among the first k     |
| truncated                                         | bool            | cut at max_length                             |
| nll_before, nll_after, first_before, first_after  | double          | summed nats                                   |
| nll_token, nll_sum, nll_first, kl_token           | double or null  | degradations; null where not measured         |
| kl_first                                          | double or null  | likewise; not in audits of before 0.2.0       |
| violated                                          | bool            | D > tau in the audit's unit, or not a number  |
| verdict_before, verdict_after                     | string          | only with a judge                             |
| harm_before, harm_after                           | double or null  | only with a judge: its probability of unsafe  |
"""

from __future__ import annotations

import math
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.certification.binomial import upper_bound
from holdfast.core.errors import CheckpointError, ResourceError
from holdfast.core.files import fsync_path, parse_parquet, read_plain_file
from holdfast.core.hashing import sha256_file
from holdfast.core.sealed_json import read_sealed, write_sealed
from holdfast.core.units import UNITS
from holdfast.records.audit_figures import CONFIDENCE, Array, AuditFigures, figures, verdict_counts, violated

if TYPE_CHECKING:
    from pyarrow import Schema, Table

TABLE_NAME, SUMMARY_NAME = "audit.parquet", "audit.json"
MEASURED = ("nll_before", "nll_after", "first_before", "first_after")
VERDICTS = ("verdict_before", "verdict_after")
HARMS = ("harm_before", "harm_after")
VERSION = 2
AGAIN = "run holdfast audit again into another folder, or restore both files"
# Sums and beta quantiles differ in their last digits between releases of numpy and scipy, and between processors.
RELATIVE, ABSOLUTE = 1e-9, 1e-12
ROLES = frozenset({"audit", "constraint", "monitor"})
EARLIER_UNITS = tuple(unit for unit in UNITS if unit != "kl_first")  # of tables without that column


class TableFigures(AuditFigures):
    """Every figure of audit.json that follows from the table, but for those of a judge."""

    truncated: int


@dataclass(frozen=True)
class StoredAudit:
    """An audit whose figures follow from its table."""

    values: dict[str, Any]
    table: Table


def write_audit_folder(
    folder: Path, values: Mapping[str, object] | Callable[[Table], Mapping[str, object]],
    parts: Iterable[Mapping[str, Any]], *, judged: bool = False,
) -> None:  # fmt: skip
    """The table, then the summary with the table's sha256 and its own: a folder with a summary is a finished audit.

    `values` may be a function of the table.
    """
    path = folder / TABLE_NAME
    table_sha256 = write_table(path, parts, judged=judged)
    summary = values(parse_table(read_plain_file(path, remedy=AGAIN), path)) if callable(values) else values
    write_sealed(folder / SUMMARY_NAME, {**summary, "version": VERSION, "table_sha256": table_sha256})


def read_audit_folder(folder: Path) -> StoredAudit:
    """The audit in a folder, recomputed; refused where a file is missing or damaged, or a figure does not follow."""
    path = folder / SUMMARY_NAME
    values = read_sealed(path, remedy=AGAIN)
    if values.get("version") != VERSION:
        version = values.get("version")
        raise CheckpointError(f"{path} has version {version!r}, expected an audit of version {VERSION}", remedy=AGAIN)
    _require_types(values, path)
    data = read_plain_file(folder / TABLE_NAME, remedy=AGAIN)
    digest = sha256(data).hexdigest()
    if digest != values["table_sha256"]:
        what = f"{folder / TABLE_NAME} was changed: {path.name} expects sha256 {values['table_sha256']}, found {digest}"
        raise CheckpointError(what, remedy=AGAIN)
    table = parse_table(data, folder / TABLE_NAME)
    _require_rows(table, values, folder / TABLE_NAME)
    _require_figures(table, values, path)
    return StoredAudit(values, table)


def _require_types(values: Mapping[str, Any], path: Path) -> None:
    """The keys by which the table is read; a value of another type is named, never computed with."""

    plain: dict[str, Any] = {"table_sha256": str, "unit": str, "tau": (int, float), "alpha": (int, float)}
    plain |= {"first_k": int, "behaviour": (dict, type(None)), "mode": str, "data": dict, "before": dict, "after": dict}
    fits = {name: isinstance(values.get(name, ...), kind) for name, kind in plain.items()}
    fits |= {name: fits[name] and not isinstance(values[name], bool) for name in ("tau", "alpha", "first_k")}
    fits["tau"] = fits["tau"] and math.isfinite(values["tau"])
    fits["alpha"] = fits["alpha"] and 0 < values["alpha"] < 1
    fits["first_k"] = fits["first_k"] and values["first_k"] >= 1
    fits["unit"] = fits["unit"] and values["unit"] in UNITS
    for name in ("data", "before", "after"):  # the weights behind an endpoint are seen by nobody
        unseen = name != "data" and fits[name] and "endpoint" in values[name]
        fits[name] = fits[name] and isinstance(values[name].get("sha256"), type(None) if unseen else str)
    wrong = [name for name, fit in fits.items() if not fit]
    if wrong:
        raise CheckpointError(f"{path}: {', '.join(wrong)} missing or of another type than expected", remedy=AGAIN)


def _require_rows(table: Table, values: Mapping[str, Any], path: Path) -> None:
    required = ("id", "role", "tokens", "first_tokens", "truncated", "nll_before", "nll_after", "violated")
    unit = values["unit"]
    faults = [f"{name} has empty cells" for name in (*required, unit) if _empty(table, name)]
    if not faults and (not table.num_rows or not set(table.column("role").to_pylist()) <= ROLES):
        faults.append("it has no rows, or roles that an audit does not have")
    if not faults:
        if twice := [name for name, count in Counter(table.column("id").to_pylist()).items() if count > 1]:
            faults.append(f"{len(twice)} ids occur twice")
        if not np.array_equal(_column(table, "violated"), violated(_column(table, unit), values["tau"])):
            faults.append(f"its violations are not those of tau = {values['tau']:g} in {unit}")
        faults += _derived_faults(table)
    if faults:
        raise CheckpointError(f"{path} contradicts itself: {'; '.join(faults)}", remedy=AGAIN)


def _derived_faults(table: Table) -> list[str]:
    faults = []
    with np.errstate(all="ignore"):
        total = _column(table, "nll_after") - _column(table, "nll_before")
        expected = {"nll_sum": total, "nll_token": total / _column(table, "tokens")}
        if not (table.column("first_before").null_count or table.column("first_after").null_count):
            first = _column(table, "first_after") - _column(table, "first_before")
            expected["nll_first"] = first / _column(table, "first_tokens")
    for unit in UNITS:
        empty = _empty(table, unit)
        if empty not in (0, table.num_rows):
            faults.append(f"{unit} has empty cells")
        elif not empty and unit in expected:
            stated = _column(table, unit)
            if not np.allclose(stated, expected[unit], rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True):
                faults.append(f"{unit} is not the difference of the losses")
    return faults


def _empty(table: Table, name: str) -> int:
    """How many cells of a column are empty: all of one that is not there."""
    return int(table.column(name).null_count if name in table.column_names else table.num_rows)


def _column(table: Table, name: str) -> Array:
    return np.asarray(table.column(name).to_numpy(zero_copy_only=False))


def degradations(table: Table, unit: str, role: str | None = None) -> Array:
    """D of every example in a unit that was measured; of one role, or of all."""
    every = _column(table, unit)
    return every if role is None else every[_column(table, "role") == role]


def table_figures(table: Table, *, unit: str, tau: float, alpha: float) -> TableFigures:
    """Every figure of audit.json that follows from the table, but for those of a judge."""
    units = [name for name in UNITS if name in table.column_names]
    measured = {
        role: {name: None if table.column(name).null_count else degradations(table, name, role) for name in units}
        for role in dict.fromkeys(table.column("role").to_pylist())
    }
    with np.errstate(all="ignore"):
        computed = figures(measured, unit=unit, tau=tau, alpha=alpha)
    return {**computed, "truncated": int(_column(table, "truncated").sum())}


def _require_figures(table: Table, values: Mapping[str, Any], path: Path) -> None:
    computed = table_figures(table, unit=values["unit"], tau=values["tau"], alpha=values["alpha"])
    wrong = _differing(values, computed) + _behaviour_faults(table, values["behaviour"])
    if wrong:
        raise CheckpointError(f"{path}: {', '.join(wrong)} do not follow from {TABLE_NAME}", remedy=AGAIN)


def _behaviour_faults(table: Table, stated: Mapping[str, Any] | None) -> list[str]:
    """The counts of the judge's verdicts; those of on-policy regressions where the judge gave probabilities."""
    judged = VERDICTS[0] in table.column_names
    if stated is None or not judged:
        return [] if (stated is None) != judged else ["behaviour"]
    was, now = (table.column(name).to_pylist() for name in VERDICTS)
    if not {*was, *now} <= {"safe", "unsafe", "unscored"}:
        return ["behaviour"]
    counts, on_policy = verdict_counts(was, now), stated.get("on_policy")
    wrong = _differing(stated, counts, "behaviour.")
    scored = any(table.column(name).null_count < table.num_rows for name in HARMS)
    if on_policy is None and not scored:
        return wrong
    if not scored or not isinstance(on_policy, dict) or not isinstance(on_policy.get("tau"), int | float):
        return [*wrong, "behaviour.on_policy"]
    # Regressions are prompts whose probability of harm rose by more than tau, or that have none on a side.
    before, after = (np.array(table.column(name).to_pylist(), dtype=np.float64) for name in HARMS)
    k, n = int((~(after - before <= on_policy["tau"])).sum()), table.num_rows
    computed = {"n": n, "regressions": k, "unscored": counts["unscored"], "rate": k / n}
    computed["upper"] = upper_bound(k, n, CONFIDENCE)
    return wrong + _differing(on_policy, computed, "behaviour.on_policy.")


def _differing(stated: Mapping[str, object], computed: Mapping[str, object], block: str = "") -> list[str]:
    return [f"{block}{name}" for name, value in sorted(computed.items()) if not _same(stated.get(name), value)]


def _same(stated: object, value: object) -> bool:
    """Equal, floats up to their last digits; a figure never passes as one of another type."""
    if isinstance(value, dict):
        return isinstance(stated, dict) and set(stated) == set(value) and all(_same(stated[k], value[k]) for k in value)
    if isinstance(value, float):
        if isinstance(stated, bool) or not isinstance(stated, int | float):
            return False
        return math.isclose(stated, value, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return type(stated) is type(value) and bool(stated == value)


def table_schema(*, judged: bool = False, units: Sequence[str] = UNITS) -> Schema:
    import pyarrow as pa

    columns = [("id", pa.string()), ("role", pa.string()), ("category", pa.string())]
    columns += [("tokens", pa.int32()), ("first_tokens", pa.int32()), ("truncated", pa.bool_())]
    columns += [(name, pa.float64()) for name in (*MEASURED, *units)]
    columns += [("violated", pa.bool_())]
    columns += [(name, pa.string()) for name in VERDICTS if judged]
    return pa.schema(columns + [(name, pa.float64()) for name in HARMS if judged])


def write_table(path: Path, parts: Iterable[Mapping[str, Any]], *, judged: bool = False) -> str:
    """Write the table part by part and move it into place in one rename; returns the sha256 of its bytes.

    A part has columns by name; one that is None or absent is null throughout. Where the disk refuses it, none of the
    file stays.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    def column(part: Mapping[str, Any], field: Any) -> Any:
        if part.get(field.name) is None:
            return pa.nulls(len(part["id"]), field.type)
        return pa.array(part[field.name], field.type, from_pandas=False)

    path.parent.mkdir(parents=True, exist_ok=True)
    schema = table_schema(judged=judged)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with pq.ParquetWriter(temporary, schema) as writer:
            for part in parts:
                writer.write_batch(pa.record_batch([column(part, field) for field in schema], schema=schema))
        fsync_path(temporary)
        digest = sha256_file(temporary)
        os.replace(temporary, path)  # noqa: PTH105  (atomic on every platform)
    except OSError as error:
        raise ResourceError(f"{path} cannot be written: {error}", remedy="free disk space, then audit again") from error
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)
    return digest


def parse_table(data: bytes, where: Path) -> Table:
    """The table in the bytes of a file; damaged ones, and other tables than an audit's, are refused."""
    remedy = "run holdfast audit again"
    try:
        table = parse_parquet(data)
        table.validate(full=True)
    except Exception as error:  # noqa: BLE001  (damaged bytes end in many types: Arrow's, OSError, MemoryError ...)
        what = f"{where} cannot be read as an audit's table ({type(error).__name__})"
        raise CheckpointError(what, remedy=remedy) from None
    known = [table_schema(judged=judged, units=units) for judged in (False, True) for units in (UNITS, EARLIER_UNITS)]
    if table.schema not in known:
        raise CheckpointError(f"{where} has other columns than an audit's table", remedy=remedy)
    return table
