"""The replies that a certificate kept: are they the ones it was made from, and do their classes follow?"""

from __future__ import annotations

from pathlib import Path

from holdfast.auditing.asking import FOLDER, class_of
from holdfast.certification.behaviour import Classes
from holdfast.certification.record import CertificateRecord
from holdfast.core.errors import CheckpointError
from holdfast.core.hashing import sha256_file
from holdfast.evaluation.refusal_rules import RULES_REVISION
from holdfast.evaluation.store import read_replies
from holdfast.records.certificate_table import Table

_RESTORE = "restore the folder of replies from where the certificate was issued, or certify again"


def require_replies(record: CertificateRecord, table: Table, folder: Path) -> bool:
    """Sort the stored replies again; False where they are not beside the certificate, or the rules are other ones.

    Replies may be harmful, so a certificate is often passed on without them; its table then stands for them.

    Raises:
        CheckpointError: a file of replies is missing or was changed, or a class does not follow from its reply.
    """
    place, listed = folder / FOLDER, record.bound["replies_sha256"]
    if not isinstance(listed, dict) or not place.is_dir():
        return False
    if set(listed) != {file.name for file in place.glob("*.jsonl")}:
        raise CheckpointError(f"{place} holds other files of replies than the certificate lists", remedy=_RESTORE)
    for name, expected in listed.items():
        file = place / Path(name).name
        if not file.is_file() or sha256_file(file) != expected:
            raise CheckpointError(f"the replies {file} are missing or were changed", remedy=_RESTORE)
    if not isinstance(table, Classes) or record.settings["replies"]["rules_revision"] != RULES_REVISION:
        return False
    for name, classes in (("before", table.before), ("again", table.again), ("after", table.after)):
        if _sorted(place, name, table) != list(classes):
            raise CheckpointError(
                f"the classes of the column {name} do not follow from the replies in {place}", remedy=_RESTORE
            )
    return True


def _sorted(place: Path, name: str, table: Classes) -> list[str]:
    first, longer = read_replies(place / f"{name}.jsonl"), place / f"{name}.longer.jsonl"
    final = first | (read_replies(longer) if longer.is_file() else {})
    missing = [one for one in table.ids if one not in final]
    if missing:
        raise CheckpointError(f"{place}: no reply to {len(missing)} prompts in {name}.jsonl", remedy=_RESTORE)
    return [class_of(final[one]) for one in table.ids]
