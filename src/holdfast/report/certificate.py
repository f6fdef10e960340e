"""`certificate.json` as figures; one that contradicts itself is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from holdfast.core.errors import CheckpointError
from holdfast.core.redaction import redact
from holdfast.records.certificate import FILE_NAME, CertificateRecord
from holdfast.records.stored_evidence import Bound, ModelPlace, believed_certificate, bound, places_of
from holdfast.report.evidence import CategoryFigures, CertificateFigures, Limit
from holdfast.report.fields import Fields
from holdfast.report.wording import one_line

WHY_LENGTH = 600


def read_certificate(
    folder: Path, audit: Fields | None, weights: Mapping[str, ModelPlace] | None
) -> CertificateFigures | None:
    """The certificate in a folder, None where there is none.

    The file's own sha256, its figures from the table and the content of both models are checked here; whether it still
    fits the prompts and the ledger is what `holdfast verify` recomputes.

    Args:
        folder: of the certificate.
        audit: of the same safety set.
        weights: `before` and `after` of the run; None where there is no run: then where the certificate says they are.

    Raises:
        CheckpointError: the file is damaged or contradicts itself.
    """
    record = believed_certificate(folder)
    if record is None:
        return None
    path = folder / FILE_NAME
    found = Fields(redact(record.to_json()), str(path))
    checked = bound(record, folder, weights or places_of(record))
    checked = replace(checked, why=one_line(redact(checked.why), WHY_LENGTH))
    certificate = _figures(found, checked, _audited_model(record, audit))
    bounded = certificate.kind in ("fixed", "finite_pool")
    if certificate.certified and bounded and not certificate.upper <= certificate.limit.alpha:
        raise CheckpointError(
            f"{path} says certified, but its bound {certificate.upper:g} is over alpha {certificate.limit.alpha:g}",
            remedy="the file was changed: run `holdfast verify` on it",
        )
    return certificate


def _figures(found: Fields, checked: Bound, audited_model: bool) -> CertificateFigures:
    strength = found.inner("strength").number("chosen") if "strength" in found else math.nan
    categories = [
        CategoryFigures(
            name, one.count("n"), one.count("regressions"), one.number("upper_bound"), one.flag("certified")
        )
        for name, one in found.objects("categories").items()
    ]
    openings = found.inner("openings")
    limit = Limit(found.number("tau"), found.share("alpha"), found.text("unit"), found.count("first_k"))
    return CertificateFigures(
        by=found.text("by"),
        certified=found.flag("certified"),
        kind=found.text("kind"),
        statement=found.text("statement"),
        limit=limit,
        confidence=found.share("confidence"),
        n=found.count("n"),
        examples=found.count("examples"),
        regressions=found.count("regressions"),
        upper=found.number("upper_bound"),
        certified_tau=found.number("certified_tau") if "certified_tau" in found else math.nan,
        strength=None if math.isnan(strength) else strength,
        categories=tuple(categories),
        assumptions=tuple(found.texts("assumptions")),
        declared=openings.count("declared"),
        this_opening=openings.count("this"),
        leakage_checked=found.inner("leakage").flag("checked"),
        bound=checked,
        audited_model=audited_model,
        fields=found,
    )


def _audited_model(record: CertificateRecord, audit: Fields | None) -> bool:
    """Whether the audit beside it speaks of the same model; of a strength search, of the adapter that was scaled."""
    if audit is None or "after" not in audit:
        return True
    certified = record.bound["after_sha256"] if record.strength is None else record.strength["original_sha256"]
    return bool(certified == audit.inner("after").text("sha256"))
