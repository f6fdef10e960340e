"""`audit.parquet` without torch: one row an example, no text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.records.audit_figures import UNITS


@dataclass(frozen=True)
class Table:
    """The columns that the report draws, in data order.

    Attributes:
        ids, roles, categories: of each example; a category may be empty.
        tokens: scored completion tokens.
        violated: D > tau in the audit's unit.
        degradations: unit to D per example; units that were not measured are absent.
    """

    ids: list[str]
    roles: NDArray[np.str_]
    categories: list[str]
    tokens: NDArray[np.int64]
    violated: NDArray[np.bool_]
    degradations: dict[str, NDArray[np.float64]]

    def of(self, role: str, unit: str) -> NDArray[np.float64]:
        """D of the examples of one role; empty where the unit was not measured."""
        found = self.degradations.get(unit)
        return np.empty(0) if found is None else found[self.roles == role]


def table_of(table: Any) -> Table:
    """The columns of a table that was read and believed (`holdfast.records.stored_evidence`)."""
    units = [unit for unit in UNITS if not table[unit].null_count]
    return Table(
        ids=table["id"].to_pylist(),
        roles=np.array(table["role"].to_pylist(), dtype=np.str_),
        categories=[category or "" for category in table["category"].to_pylist()],
        tokens=table["tokens"].to_numpy(zero_copy_only=False).astype(np.int64),
        violated=np.array(table["violated"].to_pylist(), dtype=np.bool_),
        degradations={unit: table[unit].to_numpy(zero_copy_only=False) for unit in units},
    )
