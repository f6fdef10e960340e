"""What a report speaks of: the limit, what was measured against it, and what was certified."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.records import audit_figures
from holdfast.records.run_record import SINGLE
from holdfast.records.stored_evidence import Binding, Bound
from holdfast.report.fields import Fields
from holdfast.report.wording import unit_words

UNITS = ("nll_token", "nll_first", "nll_sum", "kl_token")
QUANTILES = ("q50", "q75", "q90", "q95", "q99", "max")
OTHER_AUDITED = "The certificate in this folder is bound to another model than the one measured here."
SHOWN_DIGITS = 12
"""Of a sha256 in running text."""
ROLES = ("monitor", "audit", "constraint")
"""In the order of what they say about other prompts: held out first."""


@dataclass(frozen=True)
class Limit:
    """At most a share alpha may degrade by more than tau in the unit."""

    tau: float
    alpha: float
    unit: str
    first_k: int = 8

    @property
    def words(self) -> str:
        """The unit in words."""
        return unit_words(self.unit, self.first_k)

    def same_question(self, other: Limit) -> bool:
        """Whether a violation means the same under both (alpha may differ)."""
        if (self.tau, self.unit) != (other.tau, other.unit):
            return False
        return self.unit != "nll_first" or self.first_k == other.first_k


@dataclass(frozen=True)
class Figures:
    """One split measured: `violations` of `n` examples have D > tau; `upper` is the exact 95 % bound of the rate."""

    role: str
    n: int
    violations: int
    rate: float
    upper: float
    cvar: float
    mean: float = math.nan
    quantiles: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CategoryFigures:
    """One category of a certificate."""

    name: str
    n: int
    regressions: int
    upper: float
    certified: bool


@dataclass(frozen=True)
class CertificateFigures:
    """Counts and verdict of the certify split, which shows nothing else.

    Attributes:
        by: what was compared: behaviour, harm, kl, likelihood or log.
        bound: whether both models it speaks of are the weights in front of it.
        audited_model: the audit beside it is of the model that it is bound to, or there is none.
        strength: the largest adapter strength that certified; None where strength was not asked for or none did.
    """

    by: str
    certified: bool
    kind: str
    statement: str
    limit: Limit
    confidence: float
    n: int
    examples: int
    regressions: int
    upper: float
    certified_tau: float
    strength: float | None
    categories: tuple[CategoryFigures, ...]
    assumptions: tuple[str, ...]
    declared: int
    this_opening: int
    leakage_checked: bool
    bound: Bound
    audited_model: bool
    fields: Fields

    @property
    def steering(self) -> bool:
        """Whether likelihoods or divergences were compared, which training steers by, and no replies."""
        return self.by in ("kl", "likelihood")

    @property
    def by_prompt(self) -> bool:
        """Whether the sentence counts prompts; groups of near-duplicates otherwise."""
        return self.kind == "finite_pool" or self.fields.text("drawn", "groups") == "rows"

    @property
    def other_model(self) -> bool:
        """Whether it speaks of another model than the audit beside it, or than the weights here."""
        return not self.audited_model or self.bound.binding is Binding.OTHER

    @property
    def stands(self) -> bool:
        """Whether it certifies the adapter or model in front of us, as trained."""
        return self.certified and self.full_strength and self.checked

    @property
    def caution(self) -> str:
        """Why it is no claim about the model here, in a sentence; empty where it is one."""
        other = "" if self.audited_model else OTHER_AUDITED
        return self.bound.why or other

    @property
    def checked(self) -> bool:
        """Whether it speaks of the weights here and of the model of the audit beside it."""
        return self.bound.binding is Binding.SAME and self.audited_model

    @property
    def bound_to(self) -> str:
        """The first digits of the sha256 of the adapter or model that was certified."""
        return self.fields.inner("bound").text("after_sha256", "")[:SHOWN_DIGITS]

    @property
    def full_strength(self) -> bool:
        """Whether the claim is about the adapter as trained."""
        return self.kind != "strength" or self.strength == 1.0


@dataclass(frozen=True)
class Source:
    """Where the text of the examples can be read again."""

    data: str
    columns: dict[str, str] | None = None
    limit: int | None = None


@dataclass(frozen=True)
class Table:
    """The columns of `audit.parquet` that the report draws: a row an example, no text; a category may be empty.

    `tokens` counts scored completion tokens, `violated` is D > tau in the audit's unit, and `degradations` maps the
    units that were measured to D.
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

    @classmethod
    def of_stored(cls, table: Any) -> Table:
        """From a table that was read and believed (`holdfast.records.stored_evidence`)."""
        units = [unit for unit in audit_figures.UNITS if not table[unit].null_count]
        return cls(
            ids=table["id"].to_pylist(),
            roles=np.array(table["role"].to_pylist(), dtype=np.str_),
            categories=[category or "" for category in table["category"].to_pylist()],
            tokens=table["tokens"].to_numpy(zero_copy_only=False).astype(np.int64),
            violated=np.array(table["violated"].to_pylist(), dtype=np.bool_),
            degradations={unit: table[unit].to_numpy(zero_copy_only=False) for unit in units},
        )


@dataclass(frozen=True)
class SafetyEvidence:
    """One safety set: its limit and whatever was measured and certified about it.

    Attributes:
        figures: what the page shows; `origin` says which audit it is of, where there are two.
        beside: the figures of the other audit, `beside_origin`, which count for the verdict too.
        audits_note: which audit is shown, and whether the other one counts; empty where there is one only.
        closed: ids of the certify split: nothing about them is ever shown.
        keep: of a set that was built by asking, which replies it holds: `refusals` or `answers`.
    """

    name: str
    folder: Path
    limit: Limit | None
    noise_floor: float = math.nan
    figures: tuple[Figures, ...] = ()
    origin: str = ""
    beside: tuple[Figures, ...] = ()
    beside_origin: str = ""
    audits_note: str = ""
    units: dict[str, dict[str, float]] = field(default_factory=dict)
    audit: Fields | None = None
    behaviour: Fields | None = None
    table: Table | None = None
    certificate: CertificateFigures | None = None
    source: Source | None = None
    closed: frozenset[str] = frozenset()
    keep: str = ""

    @property
    def headline(self) -> Figures | None:
        """The split that says most about other prompts."""
        ranked = sorted(self.figures, key=lambda f: ROLES.index(f.role) if f.role in ROLES else len(ROLES))
        return ranked[0] if ranked else None

    @property
    def counted(self) -> tuple[tuple[str, Figures], ...]:
        """Every measured split of every audit that counts, with the audit's name where there are two."""
        return (*((self.origin, f) for f in self.figures), *((self.beside_origin, f) for f in self.beside))

    @property
    def over(self) -> tuple[tuple[str, Figures], ...]:
        """Those of `counted` whose rate exceeds alpha, or is not a number."""
        return tuple((who, f) for who, f in self.counted if self.limit and not f.rate <= self.limit.alpha)


@dataclass(frozen=True)
class Missing:
    """A piece that is not there, and the command that makes it."""

    what: str
    command: str


@dataclass(frozen=True)
class Evidence:
    """One folder: a run, or the output of an audit or a certification."""

    folder: Path
    name: str
    config: dict[str, Any] | None
    events: list[dict[str, Any]]
    result: Fields | None
    sets: tuple[SafetyEvidence, ...]
    missing: tuple[Missing, ...]

    @property
    def trained(self) -> bool:
        """Whether this is the folder of a training run."""
        return self.config is not None or bool(self.events) or self.result is not None

    @property
    def unfinished(self) -> bool:
        """Whether a training run has not written its result."""
        return self.trained and self.result is None

    @property
    def named(self) -> bool:
        """Whether the safety sets carry names."""
        return [one.name for one in self.sets] != [SINGLE]
