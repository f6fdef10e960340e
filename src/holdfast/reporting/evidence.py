"""What a report speaks of: the limit, what was measured against it, and what was certified."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.certification.kept import Shown, shown
from holdfast.core.units import FIRST_UNITS
from holdfast.records import audit_figures
from holdfast.records.certificate import CertificateRecord
from holdfast.records.run_record import SINGLE
from holdfast.records.stored_evidence import Binding, Bound
from holdfast.reporting.fields import Fields
from holdfast.reporting.wording import one_line, setting, unit_words

QUANTILES = tuple(audit_figures.LEVELS)
OTHER_AUDITED = "The certificate in this folder is bound to another model than the one measured here."
TRAINING = "the audit that training wrote"
LATER = "the later audit"
ALSO = "is of the same models and counts for the verdict too."
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
        return unit_words(self.unit, self.first_k)

    def same_question(self, other: "Limit") -> bool:
        """Whether a violation means the same under both (alpha may differ)."""
        if (self.tau, self.unit) != (other.tau, other.unit):
            return False
        return self.unit not in FIRST_UNITS or self.first_k == other.first_k


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

    def shown(self, alpha: float) -> Shown:
        """What the split shows of a limit: over it where the rate is, or is not a number."""
        return shown(self.upper, alpha, over=not self.rate <= alpha)


@dataclass(frozen=True)
class CertificateFigures:
    """A certificate, with secrets blanked; of the certify split, counts and verdict are all that is shown.

    `bound` says whether both models it speaks of are the weights in front of it, `audited_model` whether the audit
    beside it, if there is one, is of the model that it is bound to.
    """

    record: CertificateRecord
    sha256: str
    bound: Bound
    audited_model: bool

    @property
    def limit(self) -> Limit:
        return Limit(self.record.tau, self.record.alpha, self.record.unit, self.record.first_k)

    @property
    def strength(self) -> float | None:
        """The largest adapter strength that certified; None where strength was not asked for or none did."""
        return None if self.record.strength is None else self.record.strength["chosen"]

    @property
    def by_prompt(self) -> bool:
        """Whether the sentence counts prompts; groups of near-duplicates otherwise."""
        return self.record.kind == "finite_pool" or self.record.drawn == "rows"

    @property
    def full_strength(self) -> bool:
        """Whether the claim is about the adapter as trained."""
        return self.record.kind != "strength" or self.strength == 1.0

    @property
    def stands(self) -> bool:
        """Whether it certifies the adapter or model in front of us, as trained, which the audit beside it is of."""
        checked = self.bound.binding is Binding.SAME and self.audited_model
        return self.record.certified and self.full_strength and checked

    @property
    def other_model(self) -> bool:
        """Whether it speaks of another model than the audit beside it, or than the weights here."""
        return not self.audited_model or self.bound.binding is Binding.OTHER

    @property
    def caution(self) -> str:
        """Why it is no claim about the model here, in a sentence; empty where it is one."""
        return self.bound.why or ("" if self.audited_model else OTHER_AUDITED)


@dataclass(frozen=True)
class Source:
    data: str
    columns: dict[str, str] | None = None
    limit: int | None = None
    asked: bool = False  # `data` are examples that a run stored: what its model replied


@dataclass(frozen=True)
class SafetyEvidence:
    """One safety set: its limit and whatever was measured and certified about it.

    Where there are two audits, `origin` says which one `figures` is of, `beside` are those of the other, which count
    for the verdict too, and `audits_note` says so. `closed` are ids of the certify split: nothing about them is ever
    shown. `keep` says which replies a set that was built by asking holds: `refusals` or `answers`.
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
    table: Any = None  # audit.parquet, see `holdfast.records.audit_folder`
    certificate: CertificateFigures | None = None
    source: Source | None = None
    closed: frozenset[str] = frozenset()
    keep: str = ""

    @property
    def ordered(self) -> list[Figures]:
        """The splits, the one that says most about other prompts first."""
        return sorted(self.figures, key=lambda f: ROLES.index(f.role) if f.role in ROLES else len(ROLES))

    @property
    def headline(self) -> Figures | None:
        return next(iter(self.ordered), None)

    @property
    def counted(self) -> tuple[tuple[str, Figures], ...]:
        """Every measured split of every audit that counts, with the audit's name where there are two."""
        return (*((self.origin, f) for f in self.figures), *((self.beside_origin, f) for f in self.beside))

    @property
    def over(self) -> tuple[tuple[str, Figures], ...]:
        """Those of `counted` whose rate exceeds alpha, or is not a number."""
        return tuple((who, f) for who, f in self.counted if self.limit and f.shown(self.limit.alpha) is Shown.OVER)


@dataclass(frozen=True)
class Evidence:
    """One folder: a run, or the output of an audit or a certification."""

    folder: Path
    name: str
    config: dict[str, Any] | None
    events: list[dict[str, Any]]
    result: Fields | None
    sets: tuple[SafetyEvidence, ...]
    missing: tuple[tuple[str, str], ...] = ()  # what is not there, and the command that makes it
    writer: str | None = None  # the process that trains in this folder now

    @property
    def trained(self) -> bool:
        """Whether this is the folder of a training run."""
        return self.config is not None or bool(self.events) or self.result is not None

    @property
    def steps(self) -> int:
        """The last step that was logged; 0 where none was."""
        return max((row["step"] for row in self.events if "behaviour" not in row), default=0)

    @property
    def unfinished(self) -> bool:
        """Whether a training run has not written its result."""
        return self.trained and self.result is None

    @property
    def named(self) -> bool:
        """Whether the safety sets carry names."""
        return [one.name for one in self.sets] != [SINGLE]


@dataclass(frozen=True)
class Reading:
    """One measurement of a safety set; `audit` and `table` are None where only result.json has its counts."""

    limit: Limit
    figures: tuple[Figures, ...]
    audit: Fields | None = None
    table: Any = None

    def sha256(self, side: str) -> str:
        """Of the model `before` or `after`; empty where it was not stored."""
        return "" if self.audit is None else self.audit.inner(side).text("sha256", "")


@dataclass(frozen=True)
class Choice:
    """What is shown, what else counts for the verdict, and words for both; no words where there is one audit only."""

    shown: Reading | None
    origin: str = ""
    beside: tuple[Figures, ...] = ()
    beside_origin: str = ""
    behaviour: Fields | None = None
    note: str = ""


def choose(training: Reading | None, later: Reading | None) -> Choice:
    """The later audit is shown where it is of the same models and limit and stores no less.

    What is not shown still counts where it answers the same question about the same models. A hash that was not stored
    does not make an audit one of other models: leaving it out could only make the verdict better.
    """
    if training is None or later is None:
        shown = training or later
        return Choice(shown, behaviour=_behaviour(shown))
    behaviour = _behaviour(later) or _behaviour(training)
    for side in ("after", "before"):
        if later.audit is not None and "endpoint" in later.audit.inner(side):
            note = (
                f"Shown is {TRAINING}. {LATER.capitalize()} in audit/ is of an endpoint, whose weights were not seen, "
                "and does not count for the verdict."
            )
            return Choice(training, behaviour=_behaviour(training), note=note)
        ours, its = training.sha256(side), later.sha256(side)
        if ours and its and ours != its:
            note = (
                f"Shown is {TRAINING}. {LATER.capitalize()} in audit/ is of another model {side} "
                f"(sha256 {one_line(its[:12])}, not {one_line(ours[:12])}) and does not count for the verdict."
            )
            return Choice(training, behaviour=_behaviour(training), note=note)
    if not training.limit.same_question(later.limit):
        note = (
            f"Shown is {TRAINING}. {LATER.capitalize()} in audit/ has another limit ({setting(later.limit.tau)} "
            f"{later.limit.words}) and does not count for the verdict."
        )
        return Choice(training, behaviour=behaviour, note=note)
    if _stores_no_less(later, training):
        note = f"Shown is {LATER}, in audit/. {TRAINING.capitalize()} {ALSO}"
        return Choice(later, LATER, training.figures, TRAINING, behaviour, note)
    note = f"Shown is {TRAINING}. {LATER.capitalize()} in audit/ {ALSO}"
    return Choice(training, TRAINING, later.figures, LATER, behaviour, note)


def _behaviour(one: Reading | None) -> Fields | None:
    found = one.audit if one is not None else None
    return found.inner("behaviour") if found is not None and "behaviour" in found else None


def _stores_no_less(later: Reading, training: Reading) -> bool:
    """The same limit (CVaR is a mean over the worst alpha), and every split, unit and table that the other has."""
    roles = [{f.role for f in one.figures} for one in (later, training)]
    units = [set(one.audit.objects("units")) if one.audit is not None else set() for one in (later, training)]
    tables = later.table is not None or training.table is None
    return later.limit.alpha == training.limit.alpha and roles[0] >= roles[1] and units[0] >= units[1] and tables
