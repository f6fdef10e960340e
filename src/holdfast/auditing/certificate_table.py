"""`certificate.parquet`: what a certificate counted, one row per prompt, without any text.

Degradations of certify prompts are written for verification alone and shown nowhere, so the file is for its owner
(mode 0600).
"""

from __future__ import annotations

import io
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.certification.assessment import Rows
from holdfast.core.errors import CheckpointError
from holdfast.core.files import write_bytes

COLUMNS = ("id", "strength", "degradation", "violated", "cluster", "category")


def write_rows(path: Path, rows: Rows, tau: float) -> str:
    """Write the table, atomically and readable by the owner only; returns the sha256 of its bytes."""
    import pyarrow
    from pyarrow import parquet

    columns = {
        "id": pyarrow.array(rows.ids, pyarrow.string()),
        "strength": pyarrow.array([None if np.isnan(s) else s for s in rows.strength.tolist()], pyarrow.float64()),
        "degradation": pyarrow.array(rows.degradation.tolist(), pyarrow.float64()),
        "violated": pyarrow.array((~(rows.degradation <= tau)).tolist(), pyarrow.bool_()),
        "cluster": pyarrow.array(rows.cluster.tolist(), pyarrow.int32()),
        "category": pyarrow.array(rows.category, pyarrow.string()),
    }
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), buffer)
    data = buffer.getvalue()
    write_bytes(path, data, mode=0o600)
    return sha256(data).hexdigest()


def read_rows(path: Path, tau: float, expected_sha256: str) -> Rows:
    """Read a table whose bytes have the expected sha256 and whose violations follow from tau.

    Raises:
        CheckpointError: it is missing, changed, or not such a table.
    """
    import pyarrow
    from pyarrow import parquet

    remedy = "restore it from where the certificate was issued, or certify again"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"the certificate's table {path} cannot be read: {error.strerror}", remedy=remedy
        ) from error
    found = sha256(data).hexdigest()
    if found != expected_sha256:
        raise CheckpointError(
            f"the certificate's table {path} was changed: expected sha256 {expected_sha256}, found {found}",
            remedy=remedy,
        )
    try:
        table: dict[str, list[Any]] = parquet.read_table(pyarrow.BufferReader(data)).to_pydict()
        rows = Rows(
            ids=table["id"],
            degradation=np.array(table["degradation"], dtype=np.float64),
            cluster=np.array(table["cluster"], dtype=np.int64),
            category=table["category"],
            strength=np.array([np.nan if s is None else s for s in table["strength"]], dtype=np.float64),
        )
        fits = tuple(table) == COLUMNS and table["violated"] == (~(rows.degradation <= tau)).tolist()
    except (pyarrow.ArrowInvalid, KeyError, TypeError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not a certificate's table", remedy=remedy) from error
    if not fits:
        raise CheckpointError(f"{path}: its violations are not those of tau = {tau:g}", remedy=remedy)
    return rows
