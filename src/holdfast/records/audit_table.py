"""`audit.parquet`: one row an example, in the order of the data, without any of its text. No torch.

| column                                            | type            |                                               |
|---------------------------------------------------|-----------------|-----------------------------------------------|
| id                                                | string          | hash of prompt and completion                 |
| role                                              | string          | `audit`, `constraint` or `monitor`            |
| category                                          | string or null  | the data's own label                          |
| tokens, first_tokens                              | int32           | scored tokens; of these among the first k     |
| truncated                                         | bool            | cut at max_length                             |
| nll_before, nll_after, first_before, first_after  | double          | summed nats                                   |
| nll_token, nll_sum, nll_first, kl_token           | double or null  | degradations; null where not measured         |
| violated                                          | bool            | D > tau in the audit's unit, or not a number  |
| verdict_before, verdict_after                     | string          | only with a judge                             |
| harm_before, harm_after                           | double or null  | only with a judge: its probability of unsafe  |

The file says nothing about itself: `audit.json` holds the sha256 of its bytes.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import CheckpointError, ConfigError, ResourceError
from holdfast.core.files import fsync_path
from holdfast.core.hashing import sha256_file
from holdfast.core.registry import nearest
from holdfast.records.audit_figures import UNITS, Array

TABLE_NAME, SUMMARY_NAME = "audit.parquet", "audit.json"
MEASURED = ("nll_before", "nll_after", "first_before", "first_after")
VERDICTS = ("verdict_before", "verdict_after")
HARMS = ("harm_before", "harm_after")


def table_schema(*, judged: bool = False) -> Any:
    import pyarrow as pa

    columns = [("id", pa.string()), ("role", pa.string()), ("category", pa.string())]
    columns += [("tokens", pa.int32()), ("first_tokens", pa.int32()), ("truncated", pa.bool_())]
    columns += [(name, pa.float64()) for name in (*MEASURED, *UNITS)]
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


def parse_table(data: bytes, where: Path) -> Any:
    """The table in the bytes of a file; damaged ones, and other tables than an audit's, are refused."""
    import pyarrow.parquet as pq

    remedy = "run holdfast audit again"
    try:
        table = pq.read_table(io.BytesIO(data))
        table.validate(full=True)
    except Exception as error:  # noqa: BLE001  (damaged bytes end in many types: Arrow's, OSError, MemoryError ...)
        raise CheckpointError(
            f"{where} cannot be read as an audit's table ({type(error).__name__})", remedy=remedy
        ) from None
    if not any(table.schema.equals(table_schema(judged=judged)) for judged in (False, True)):
        raise CheckpointError(f"{where} has other columns than an audit's table", remedy=remedy)
    return table


def degradations(table: Any, unit: str, *, role: str | None = None) -> Array:
    """D of every example of a role, or of all, in `unit`."""
    if unit not in UNITS:
        raise ConfigError(f"unknown unit {unit!r}", remedy=nearest(unit, list(UNITS)))
    values = table.column(unit)
    if values.null_count:
        raise ConfigError(f"unit {unit!r} was not measured in this audit", remedy="audit again with that unit")
    found = np.asarray(values.to_numpy())
    return found if role is None else found[np.asarray(table.column("role").to_pylist(), dtype=object) == role]
