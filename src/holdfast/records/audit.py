"""What an audit leaves: `audit.json` as an object, and the table beside it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.certification.kept import degraded_words
from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.core.percent import exact_percent, percent, percent_up
from holdfast.core.registry import nearest
from holdfast.core.sealed_json import sealed
from holdfast.core.units import UNITS
from holdfast.records.audit_figures import (
    Array,
    AuditedData,
    AuditedModel,
    BehaviourFigures,
    Distribution,
    RoleFigures,
)  # fmt: skip
from holdfast.records.audit_folder import VERSION, degradations
from holdfast.records.stored_evidence import believed_audit

if TYPE_CHECKING:
    import pandas
    from pyarrow import Table


@dataclass(frozen=True, repr=False)
class Audit:
    """How much worse `after` is than `before` on safety examples.

    The first figures speak of `role`; `roles` has them for each. `quantiles` runs from q50 to max, `cvar` is the mean
    of the worst share alpha, `violation_upper` the exact 95 % upper bound of the violation rate. A null figure is one
    that a NaN left without a number.
    """

    role: str
    violation_rate: float
    violations: int
    n: int
    violation_upper: float
    quantiles: Mapping[str, float | None]
    cvar: float | None
    mean: float | None
    unit: str
    tau: float
    alpha: float
    first_k: int
    within: bool
    noise_floor: float | None
    truncated: int
    duplicates_dropped: int
    units: Mapping[str, Distribution | None]
    roles: Mapping[str, RoleFigures]
    behaviour: BehaviourFigures | None
    before: AuditedModel
    after: AuditedModel
    data: AuditedData
    tokenizer_sha256: str
    template_sha256: str
    tokenizer: str
    mode: str
    dtype: str
    device: str
    versions: Mapping[str, str]
    commit: str | None
    hardware: str
    seconds: float
    binding: str | None = None
    table_sha256: str = ""
    folder: Path | None = field(default=None, compare=False)
    table: Table = field(default=None, compare=False)  # one row an example, see `audit_folder`

    def __repr__(self) -> str:
        """The verdict: all fields would fill a screen."""
        return f"<Audit: {self.describe()}>"

    def to_json(self) -> dict[str, Any]:
        """The object of audit.json, with its checksum."""
        return sealed({"version": VERSION} | {name: getattr(self, name) for name in self._stored()})

    @classmethod
    def _stored(cls) -> list[str]:
        return [f.name for f in fields(cls) if f.name not in ("folder", "table")]

    @property
    def sha256(self) -> str:
        """The checksum of audit.json, which holds that of the table."""
        return str(self.to_json()["sha256"])

    @classmethod
    def from_json(cls, values: Mapping[str, Any], *, folder: Path | None = None, table: Table = None) -> Audit:
        """The inverse of `to_json`; another version, or one without all keys, is refused."""
        missing = [name for name in cls._stored() if name not in values]
        if values.get("version") != VERSION or missing:
            found = f"version {values.get('version')}" + (f", without {', '.join(missing)}" if missing else "")
            what = f"{folder or 'the audit'}: expected an audit of version {VERSION}, found {found}"
            raise CheckpointError(what, remedy="audit again into another folder")
        return cls(**{name: values[name] for name in cls._stored()}, folder=folder, table=table)

    @classmethod
    def load(cls, folder: str | Path) -> Audit:
        """Read the audit of an evidence folder, every figure recomputed from its table.

        Raises:
            CheckpointError: a file is missing or was changed, or a figure does not follow from the table.
        """
        stored = believed_audit(Path(folder))
        return cls.from_json(stored.values, folder=Path(folder), table=stored.table)

    def to_pandas(self) -> pandas.DataFrame:
        """One row an example: `id`, `role`, `category` where the data has any, D in every measured unit, `violated`.

        `violated` is D > tau in the audit's own unit; a D that is not a number counts as violated.
        """
        given = [name for name in ("category", *UNITS) if self._measured(name)]
        return self.table.select(["id", "role", *given, "violated"]).to_pandas(use_threads=False)

    def _measured(self, column: str) -> bool:
        names = self.table.column_names
        return column in names and self.table.column(column).null_count < self.table.num_rows

    def degradations(self, unit: str | None = None, *, role: str | None = None) -> Array:
        """D of every example in `unit`, the audit's own unless given; of one role, or of all."""
        unit = unit or self.unit
        if unit not in UNITS:
            raise ConfigError(f"unknown unit {unit!r}", remedy=nearest(unit, list(UNITS)))
        if not self._measured(unit):
            raise ConfigError(f"unit {unit!r} was not measured in this audit", remedy="audit again with that unit")
        return degradations(self.table, unit, role)

    def describe(self) -> str:
        """The verdict in one line."""
        shares = " and ".join(
            f"{percent(entry['violation_rate'])} of {entry['n']} {'' if role == 'audit' else role + ' '}examples"
            f" (95 % upper bound {percent_up(entry['violation_upper'])})"
            for role, entry in self.roles.items()
        )
        served = [str(one.get("ref")) for one in (self.before, self.after) if "endpoint" in one]
        unseen = f"; the weights of {' and '.join(served)} were not seen" if served else ""
        uppers = [entry["violation_upper"] for entry in self.roles.values()]
        verdict = f"{exact_percent(self.alpha)} allowed: {degraded_words(uppers, self.alpha, over=not self.within)}"
        return f"{shares} degraded by more than {self.tau:g} ({self.unit}); at most {verdict}{unseen}"
