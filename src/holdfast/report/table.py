"""`audit.parquet` without torch: one row an example, no text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.core.errors import CheckpointError

METADATA = b"holdfast"
REQUIRED = ("id", "role", "tokens", "violated", "nll_token")


@dataclass(frozen=True)
class Table:
    """The columns that the report draws, in data order.

    Attributes:
        ids, roles, categories: of each example; a category may be empty.
        tokens: scored completion tokens.
        violated: D > tau in the audit's unit.
        degradations: unit to D per example; units that were not measured are absent.
        audit: the audit's summary, stored beside the columns.
    """

    ids: list[str]
    roles: NDArray[np.str_]
    categories: list[str]
    tokens: NDArray[np.int64]
    violated: NDArray[np.bool_]
    degradations: dict[str, NDArray[np.float64]]
    audit: Any

    def of(self, role: str, unit: str) -> NDArray[np.float64]:
        """D of the examples of one role; empty where the unit was not measured."""
        found = self.degradations.get(unit)
        return np.empty(0) if found is None else found[self.roles == role]


def read_table(path: Path) -> Table | None:
    """Read a table; None where there is no such file.

    Raises:
        CheckpointError: the file is damaged or has other columns.
    """
    if not path.exists():
        return None
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        missing = [name for name in REQUIRED if name not in table.column_names]
        if missing:
            raise ValueError(f"no column {missing[0]!r}")
        audit = json.loads((table.schema.metadata or {}).get(METADATA, b"{}"))
        columns = {name: table[name].to_pylist() for name in ("id", "role")}
        categories = table["category"].to_pylist() if "category" in table.column_names else [None] * len(table)
        units = [name for name in ("nll_token", "nll_sum", "nll_first", "kl_token") if name in table.column_names]
        degradations = {
            unit: table[unit].cast(pa.float64()).to_numpy(zero_copy_only=False)
            for unit in units
            if table[unit].null_count < max(len(table), 1)
        }
        return Table(
            ids=[str(item) for item in columns["id"]],
            roles=np.array([str(item) for item in columns["role"]], dtype=np.str_),
            categories=[item if isinstance(item, str) else "" for item in categories],
            tokens=table["tokens"].cast(pa.int64()).to_numpy(zero_copy_only=False),
            violated=np.array([bool(item) for item in table["violated"].to_pylist()], dtype=np.bool_),
            degradations=degradations,
            audit=audit.get("audit") if isinstance(audit, dict) else None,
        )
    except (OSError, ValueError, TypeError, pa.ArrowException) as error:
        raise CheckpointError(
            f"{path} cannot be read as an audit table ({type(error).__name__})",
            remedy="delete it and run `holdfast audit` again, or restore it from a backup",
        ) from error
