"""Two audits of one run: which of them the page shows, and what the other adds to the verdict."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.report.evidence import SHOWN_DIGITS, Figures, Limit, Table
from holdfast.report.fields import Fields
from holdfast.report.wording import one_line, setting

TRAINING = "the audit that training wrote"
LATER = "the later audit"
ALSO = "is of the same models and counts for the verdict too."


@dataclass(frozen=True)
class Reading:
    """One measurement of a safety set; `audit` and `table` are None where only result.json has its counts."""

    limit: Limit
    figures: tuple[Figures, ...]
    audit: Fields | None = None
    table: Table | None = None

    def sha256(self, side: str) -> str:
        """Of the model `before` or `after`; empty where it was not stored."""
        if self.audit is None or side not in self.audit:
            return ""
        return self.audit.inner(side).text("sha256", "")


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
        ours, its = training.sha256(side), later.sha256(side)
        if ours and its and ours != its:
            note = (
                f"Shown is {TRAINING}. {LATER.capitalize()} in audit/ is of another model {side} "
                f"(sha256 {_short(its)}, not {_short(ours)}) and does not count for the verdict."
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


def _short(sha256: str) -> str:
    return one_line(sha256[:SHOWN_DIGITS])


def _stores_no_less(later: Reading, training: Reading) -> bool:
    """The same limit (CVaR is a mean over the worst alpha), and every split, unit and table that the other has."""
    roles = [{f.role for f in one.figures} for one in (later, training)]
    units = [set(one.audit.objects("units")) if one.audit is not None else set() for one in (later, training)]
    tables = later.table is not None or training.table is None
    return later.limit.alpha == training.limit.alpha and roles[0] >= roles[1] and units[0] >= units[1] and tables
