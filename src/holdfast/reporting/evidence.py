"""What a report speaks of: the limit, what was measured against it, and what was certified."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.certification.kept import Shown, shown
from holdfast.core.units import FIRST_UNITS
from holdfast.records.audit_figures import LEVELS
from holdfast.records.certificate import CertificateRecord
from holdfast.records.run_record import SINGLE
from holdfast.records.stored_evidence import Binding, Bound
from holdfast.reporting.fields import Fields
from holdfast.reporting.wording import one_line, setting, unit_words

QUANTILES = tuple(LEVELS)
OTHER_AUDITED = "The certificate in this folder is bound to another model than the one measured here."
TRAINING, LATER = "the audit that training wrote", "the later audit"
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
    """A certificate, with secrets blanked; of the certify split, counts and verdict are all that is shown."""

    record: CertificateRecord
    sha256: str
    bound: Bound  # whether both models it speaks of are the weights in front of it
    audited_model: bool  # whether the audit beside it, if there is one, is of the model that it is bound to

    @property
    def limit(self) -> Limit:
        return Limit(self.record.tau, self.record.alpha, self.record.unit, self.record.first_k)

    @property
    def strength(self) -> float | None:
        """The largest adapter strength that certified; None where strength was not asked for or none did."""
        return (self.record.strength or {}).get("chosen")

    @property
    def by_prompt(self) -> bool:
        """Whether the sentence counts prompts; groups of near-duplicates otherwise."""
        return self.record.kind == "finite_pool" or self.record.drawn == "rows"

    @property
    def passed(self) -> bool:
        """Whether the adapter as trained was certified, at its full strength."""
        return self.record.certified and (self.record.kind != "strength" or self.strength == 1.0)

    @property
    def stands(self) -> bool:
        """Whether it certifies the adapter or model in front of us, as trained, which the audit beside it is of."""
        return self.passed and self.bound.binding is Binding.SAME and self.audited_model

    @property
    def other_model(self) -> bool:
        """Whether it speaks of another model than the audit beside it, or than the weights here."""
        return not self.audited_model or self.bound.binding is Binding.OTHER

    @property
    def caution(self) -> str:
        """Why it is no claim about the model here, in a sentence; empty where it is one."""
        return self.bound.why or ("" if self.audited_model else OTHER_AUDITED)


@dataclass(frozen=True)
class SafetyEvidence:
    """One safety set: its limit and whatever was measured and certified about it."""

    name: str
    folder: Path
    limit: Limit | None
    noise_floor: float = math.nan
    figures: tuple[Figures, ...] = ()
    origin: str = ""  # where there are two audits: which one `figures` is of
    beside: tuple[Figures, ...] = ()  # of the other audit, which count for the verdict too
    beside_origin: str = ""
    audits_note: str = ""  # says so
    units: dict[str, dict[str, float]] = field(default_factory=dict)
    audit: Fields | None = None
    behaviour: Fields | None = None
    table: Any = None  # audit.parquet, see `holdfast.records.audit_folder`
    certificate: CertificateFigures | None = None
    source: Mapping[str, Any] | None = None  # where the examples lie: `data`, `columns`, `limit`
    closed: frozenset[str] = frozenset()  # ids of the certify split: nothing about them is ever shown
    keep: str = ""  # which replies a set that was built by asking holds: `refusals` or `answers`

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
        return self.config is not None or bool(self.events) or self.result is not None

    @property
    def steps(self) -> int:
        return max((row["step"] for row in self.events if "behaviour" not in row), default=0)

    @property
    def unfinished(self) -> bool:
        return self.trained and self.result is None

    @property
    def named(self) -> bool:
        return [one.name for one in self.sets] != [SINGLE]


@dataclass(frozen=True)
class Reading:
    """One measurement of a safety set; `audit` and `table` are None where only result.json has its counts."""

    limit: Limit
    figures: tuple[Figures, ...]
    audit: Fields | None = None
    table: Any = None

    @property
    def behaviour(self) -> Fields | None:
        return self.audit.inner("behaviour") if self.audit is not None and "behaviour" in self.audit else None


def choose(training: Reading | None, later: Reading | None) -> dict[str, Any]:
    """What is shown, what else counts for the verdict, and words for both, as fields of `SafetyEvidence`.

    The later audit is shown where it is of the same models and limit and stores no less; the other counts where it
    answers the same question. One whose hash was not stored counts: leaving it out could only make the verdict better.
    """
    if training is None or later is None:
        return _shown(training or later)
    later_is, ignored = f"Shown is {TRAINING}. {LATER.capitalize()} in audit/", "and does not count for the verdict."
    if found := _of_other_models(training, later):
        return _shown(training) | {"audits_note": f"{later_is} {found} {ignored}"}
    both = {"behaviour": later.behaviour or training.behaviour}
    if not training.limit.same_question(later.limit):
        other = f"has another limit ({setting(later.limit.tau)} {later.limit.words})"
        return _shown(training) | both | {"audits_note": f"{later_is} {other} {ignored}"}
    also = "is of the same models and counts for the verdict too."
    if _stores_no_less(later, training):
        note = f"Shown is {LATER}, in audit/. {TRAINING.capitalize()} {also}"
        beside = {"origin": LATER, "beside": training.figures, "beside_origin": TRAINING}
        return _shown(later) | both | beside | {"audits_note": note}
    beside = {"origin": TRAINING, "beside": later.figures, "beside_origin": LATER}
    return _shown(training) | both | beside | {"audits_note": f"{later_is} {also}"}


def _shown(one: Reading | None) -> dict[str, Any]:
    names = ("limit", "figures", "audit", "table", "behaviour")
    return {"limit": None} if one is None else {name: getattr(one, name) for name in names}


def _of_other_models(training: Reading, later: Reading) -> str:
    """How the later audit is known to be of other models; empty where it is not."""
    if later.audit is None:
        return ""
    for side in ("after", "before"):
        inner = later.audit.inner(side)
        if "endpoint" in inner:
            return "is of an endpoint, whose weights were not seen,"
        ours = "" if training.audit is None else training.audit.inner(side).text("sha256", "")
        its = inner.text("sha256", "")
        if ours and its and ours != its:
            return f"is of another model {side} (sha256 {one_line(its[:12])}, not {one_line(ours[:12])})"
    return ""


def _stores_no_less(later: Reading, training: Reading) -> bool:
    """The same limit (CVaR is a mean over the worst alpha), and every split, unit and table that the other has."""
    roles = [{f.role for f in one.figures} for one in (later, training)]
    units = [set(one.audit.objects("units")) if one.audit is not None else set() for one in (later, training)]
    tables = later.table is not None or training.table is None
    return later.limit.alpha == training.limit.alpha and roles[0] >= roles[1] and units[0] >= units[1] and tables
