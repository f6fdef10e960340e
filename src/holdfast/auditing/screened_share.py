"""A certificate of a run that asked its model: are its prompts the run's certify share, as screening recorded it?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from holdfast.certification.behaviour import Classes
from holdfast.certification.openings import Ledger
from holdfast.certification.public_prompts import ScopedLedger, scope_of
from holdfast.certification.record import CertificateRecord
from holdfast.core.errors import CheckpointError
from holdfast.core.hashing import sha256_file
from holdfast.data.bundled import public_ids
from holdfast.data.examples import Example
from holdfast.records.certificate_table import Table
from holdfast.screening.certify_share import certify_share
from holdfast.screening.record import load_finished

_ISSUE = "it is not what the certificate was issued for: restore it, or certify again"


def ledger_at(path: Path, record: CertificateRecord, examples: Sequence[Example]) -> Ledger:
    """The ledger that the certificate was entered in, as it was entered there."""
    if record.screening is None:
        return Ledger(path)
    scope = scope_of(record.bound["before_sha256"], record.screening["task_sha256"])
    return ScopedLedger(path, scope, public_ids(examples))


def require_share(record: CertificateRecord, table: Table, examples: Sequence[Example]) -> None:
    """The screening record is the one that was bound, and what the certificate says of it follows from it.

    Raises:
        CheckpointError: it is missing or was changed, the prompts are not its certify share, or its counts are others.
    """
    stated = record.screening or {}
    if len(public_ids(examples)) != stated["public"]:
        raise CheckpointError(
            f"{len(public_ids(examples))} of the certificate's prompts ship with this version of holdfast, and it says "
            f"{stated['public']}",
            remedy=f"verify with the version that issued it: holdfast {record.versions.get('holdfast', 'as recorded')}",
        )
    place = record.places["splits"]
    if place is None or not Path(place).is_file():
        raise CheckpointError(f"the record of the run's screening, {place}, is missing", remedy=_ISSUE)
    found = sha256_file(Path(place))
    if found != record.bound["splits_sha256"]:
        expected = record.bound["splits_sha256"]
        raise CheckpointError(f"{place} was changed: expected sha256 {expected}, found {found}", remedy=_ISSUE)
    screening, made = load_finished(Path(place).parent)
    names = [name for name in stated["sets"] if name in screening.sets and name in made["sets"]]
    share = certify_share(screening, {name: made["sets"][name]["keep"] for name in names}, made["task_content_sha256"])
    if share.block() != stated:
        raise CheckpointError(f"the certificate's figures of screening are not those of {place}", remedy=_ISSUE)
    if set(share.keep) != {example.id for example in examples}:
        raise CheckpointError(f"the prompts are not the certify share in {place}", remedy=_ISSUE)
    kept = table.keep if isinstance(table, Classes) else None
    if kept is not None and list(kept) != [share.keep[name] for name in table.ids]:
        raise CheckpointError(f"what the table's prompts keep is not what {place} says", remedy=_ISSUE)
