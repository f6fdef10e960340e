"""Audits in the ledger of openings: what they may not look at, and the look they leave behind."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from holdfast.auditing.judging import Judging
from holdfast.certification.claim import look_sha256
from holdfast.certification.openings import Ledger
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import DataError
from holdfast.evaluation.on_policy import UNIT

logger = logging.getLogger(__name__)


def require_open(ledgers: Collection[Path], texts: Mapping[str, str]) -> None:
    """Refuse examples that are closed for the certification of a run: nothing could certify it after this audit.

    Raises:
        DataError: with the count, and the audit that leaves them closed.
    """
    for share in (one for place in ledgers for one in Ledger(place).closed(list(texts), texts=texts)):
        raise DataError(
            f"{len(share.ids)} of {len(texts)} examples are closed for certification of {share.run}",
            remedy=f"use `holdfast audit {share.run}`, which leaves them closed, or --open (open_closed=True) to spend "
            "an opening",
        )


def note_look(
    ledger: Ledger,
    models: tuple[str, str],
    texts: Mapping[str, str],
    limit: ChanceConstraint,
    settings: Mapping[str, Any],
    judge: Judging | None,
    harm_tau: float,
) -> None:
    """Enter the look into the ledger of these prompts: another claim on them can no longer certify undeclared.

    With a judge that a certificate could be bound to, the audit is a second look: at the on-policy regressions.

    Args:
        models: content of the model before and of the one after.
        texts: by id, the prompt's mark.
    """
    looks = [look_sha256(*models, limit.unit, limit.tau, limit.alpha, limit.first_k, settings)]
    if judge is not None:
        judged = {**settings, "judge": judge.to_json()}
        looks.append(look_sha256(*models, UNIT, harm_tau, limit.alpha, limit.first_k, judged))
    for look in looks:
        ledger.record_look(look, list(texts), texts=texts)
    logger.info("the look at these prompts is noted in %s", ledger.path)
