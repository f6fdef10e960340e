"""`certificate.json` as figures; one that contradicts itself is refused."""

from __future__ import annotations

import math
from pathlib import Path

from holdfast.certification.record import load_certificate
from holdfast.core.errors import CheckpointError
from holdfast.report.evidence import CategoryFigures, CertificateFigures, Limit
from holdfast.report.fields import Fields, read_object


def read_certificate(path: Path, audit: Fields | None) -> CertificateFigures | None:
    """The certificate in a folder, None where there is none.

    The file's own sha256 and its arithmetic are checked here; whether it still fits the model and the data is
    what `holdfast certify --verify` recomputes.

    Raises:
        CheckpointError: the file is damaged or contradicts itself.
    """
    found = read_object(path)
    if found is None:
        return None
    load_certificate(path)
    certificate = _figures(found, audit)
    bounded = certificate.kind in ("fixed", "finite_pool")
    if certificate.certified and bounded and not certificate.upper <= certificate.limit.alpha:
        raise CheckpointError(
            f"{path} says certified, but its bound {certificate.upper:g} is over alpha {certificate.limit.alpha:g}",
            remedy="the file was changed: run `holdfast certify --verify` on it",
        )
    return certificate


def _figures(found: Fields, audit: Fields | None) -> CertificateFigures:
    strength = found.inner("strength").number("chosen") if "strength" in found else math.nan
    categories = [
        CategoryFigures(
            name, one.count("n"), one.count("regressions"), one.number("upper_bound"), one.flag("certified")
        )
        for name, one in found.objects("categories").items()
    ]
    openings = found.inner("openings")
    limit = Limit(
        found.number("tau"), found.share("alpha"), found.text("unit"), int(found.number("first_k", default=8))
    )
    return CertificateFigures(
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
        other_model=_other_model(found, audit),
        fields=found,
    )


def _other_model(found: Fields, audit: Fields | None) -> bool:
    """Whether the audit beside it speaks of another model; a strength search certifies a scaled one by design."""
    if audit is None or found.text("kind") == "strength":
        return False
    certified = found.inner("bound").text("after_sha256", "")
    audited = audit.inner("after").text("sha256", "") if "after" in audit else ""
    return bool(certified and audited) and certified != audited
