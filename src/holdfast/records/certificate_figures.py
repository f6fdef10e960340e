"""Do the figures of a certificate follow from its table? Asked by whoever reads one again: verify, report, certify."""

from __future__ import annotations

from holdfast.certification.behaviour import Claimed
from holdfast.certification.record import CertificateRecord
from holdfast.certification.sentence import assessed, named_statement, words_of
from holdfast.certification.terms import Terms
from holdfast.core.errors import CheckpointError, HoldfastError
from holdfast.records.certificate_table import Table

_ISSUE = "it is not what the certificate was issued for: restore it, or certify again"


def require_figures(record: CertificateRecord, table: Table) -> None:
    """Every figure, the statement and the verdict, from the table.

    Raises:
        CheckpointError: naming those that do not follow.
    """
    try:
        terms = Terms(
            record.kind, record.tau, record.alpha, record.confidence, record.openings["declared"], record.pool,
            record.unit, drawn=record.drawn, max_weight=record.max_weight, words=words_of(record.by),
        )  # fmt: skip
        found = assessed(table, terms, claims_of(record))
    except CheckpointError:
        raise
    except (HoldfastError, ValueError, TypeError, ArithmeticError) as error:
        raise CheckpointError(f"the certificate's figures cannot be computed: {error}", remedy=_ISSUE) from error
    if found["strength"] is not None:
        stated = record.strength or {}
        found["strength"] |= {key: stated.get(key) for key in ("original", "original_sha256")}
        found["strength"]["adapter"] = None if found["strength"]["chosen"] is None else record.places["after"]
    if found["behaviour"] is not None and record.behaviour is not None:
        found["behaviour"] = record.behaviour | found["behaviour"]
    found["statement"] = named_statement(
        found["statement"], record.by, record.models, record.bound, found["behaviour"], record.screening
    )
    _require_asked(record)
    values = record.to_json()
    wrong = sorted(name for name in found if found[name] != values[name])
    if wrong:
        raise CheckpointError(f"the certificate's {', '.join(wrong)} do not follow from its table", remedy=_ISSUE)
    if record.bound["reference_sha256"] != record.bound["before_sha256"]:
        raise CheckpointError("the certificate's reference is not its model before", remedy=_ISSUE)
    if record.bound["before_sha256"] == record.bound["after_sha256"]:
        raise CheckpointError("the certificate compares a model with itself", remedy=_ISSUE)


def _require_asked(record: CertificateRecord) -> None:
    """How replies were made and sorted is what the claim was entered with."""
    if record.behaviour is None:
        return
    how, seen = record.settings["replies"], record.behaviour
    stated = (seen["rules"], seen["max_new_tokens"], seen["longest"])
    entered = ({"name": how.get("rules"), "revision": how.get("rules_revision")}, how.get("max_new_tokens"),
               how.get("longest"))  # fmt: skip
    if stated != entered:
        raise CheckpointError("the certificate's rules or lengths are not those of its claim", remedy=_ISSUE)


def claims_of(record: CertificateRecord) -> tuple[Claimed, ...]:
    """What a behaviour certificate claims: refusals, and answers where it has a second claim."""
    return (Claimed.REFUSALS,) if record.also is None else (Claimed.REFUSALS, Claimed.ANSWERS)
