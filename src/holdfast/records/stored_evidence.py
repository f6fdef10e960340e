"""May this stored evidence be believed? The one place that answers, for every command that reads evidence again.

| what is read                     | believed where                                                                   |
|----------------------------------|----------------------------------------------------------------------------------|
| audit.json, audit.parquet        | both checksums fit, and every figure follows from the table (`audit_folder`)      |
| result.json, config.yaml         | the checksum fits, and the settings are those that the run was made with          |
| an audit that training wrote     | it is the one that result.json names, on the prompts that splits.json names       |
| certificate.json, its table      | checksums fit, figures follow from the table, and its models are those in front   |
| the name of a safety set         | a run file could give it: it never leads out of the run folder (`run_record`)     |

A symbolic link is never followed inside a run folder. What fails is refused with `CheckpointError` (exit code 6);
only where a certificate's models are not on this machine is the answer "not checked".

Nothing here can tell who wrote a file: whoever changes table, figures and every checksum together writes evidence
that agrees with itself. A certificate's sha256 kept elsewhere (`verify --expect`) or its signature closes that gap.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from holdfast.core.errors import CheckpointError, ConfigError, HoldfastError
from holdfast.data.split_record import RECORD_NAME, SplitRecord, load_record
from holdfast.records.audit_folder import AGAIN, SUMMARY_NAME, StoredAudit, read_audit_folder
from holdfast.records.certificate import FILE_NAME, TABLE_NAME, CertificateRecord, load_certificate
from holdfast.records.certificate_table import read_stored, require_figures
from holdfast.records.run_record import RESULT_NAME, is_there, no_link, read_result

HELD = ("constraint", "monitor")
"""The roles that training measures; the third stays closed."""


def believed_audit(folder: Path, *, split: SplitRecord | None = None) -> StoredAudit:
    """The audit in a folder; with a run's `split`, its table lists exactly the prompts of the roles it measured."""
    stored = read_audit_folder(no_link(folder))
    if split is None:
        return stored
    listed: dict[str, set[str]] = {}
    for role, name in zip(*(stored.table.column(key).to_pylist() for key in ("role", "id")), strict=True):
        listed.setdefault(role, set()).add(name)
    wrong = [role for role, names in listed.items() if role in HELD and names != set(split.ids[role])]
    if set(HELD) & set(listed):  # an audit of other data may lie in a run folder too
        wrong += [role for role in HELD if split.ids[role] and role not in listed]
    if wrong:
        what = f"{folder}: the {' and '.join(wrong)} prompts of the audit are not those of {RECORD_NAME}"
        raise CheckpointError(what, remedy=AGAIN)
    return stored


def believed_run_audit(folder: Path, name: str, result: Mapping[str, Any] | None) -> StoredAudit | None:
    """The audit that training wrote into the folder of a safety set; None where there is none."""
    path = folder / SUMMARY_NAME
    if not is_there(path):
        return None
    split = load_record(folder) if (folder / RECORD_NAME).exists() else None
    audit = believed_audit(folder, split=split)
    if result is None:
        return audit
    named = result.get("audit_sha256")
    if isinstance(named, Mapping) and named.get(name) not in (None, audit.values["sha256"]):
        raise CheckpointError(f"{path} is not the audit that {RESULT_NAME} names", remedy=AGAIN)
    measured = (result.get("safety") or {}).get(name)
    for role, figures in audit.values["roles"].items():
        stated = measured.get(role) if isinstance(measured, Mapping) else None
        if isinstance(stated, Mapping) and any(stated.get(key) != figures[key] for key in ("n", "violation_rate")):
            raise CheckpointError(f"{path}: the {role} figures are not those of {RESULT_NAME}", remedy=AGAIN)
    return audit


def believed_result(run: Path) -> dict[str, Any] | None:
    """The result of a run whose settings are those it was made with; None where the run is not finished."""
    return read_result(run) if is_there(run / RESULT_NAME) else None


class Binding(StrEnum):
    """How a certificate stands to the weights in front of it."""

    SAME = "same"
    OTHER = "other"
    ITSELF = "itself"
    NOT_AT_HAND = "not at hand"


@dataclass(frozen=True)
class Bound:
    """A certificate's binding, and what was found in one sentence; empty where all is well."""

    binding: Binding
    why: str = ""


def believed_certificate(folder: Path) -> CertificateRecord | None:
    """The certificate in a folder; None where there is none. Which model it speaks of is another question: `bound`."""
    path = folder / FILE_NAME
    if not is_there(path):
        return None
    record = load_certificate(no_link(path))
    no_link(folder / TABLE_NAME)
    require_figures(record, read_stored(record, folder))
    return record


@dataclass(frozen=True)
class ModelPlace:
    """Where a model of a certificate should be: a folder or hub id, with its revision."""

    ref: str | Path
    revision: str | None = None


def places_of(record: CertificateRecord) -> dict[str, ModelPlace]:
    places, settings = record.places, record.settings
    return {
        "before": ModelPlace(places["before"], settings["before_revision"]),
        "after": ModelPlace(places["after"], settings["after_revision"]),
    }


def bound(record: CertificateRecord, folder: Path, places: Mapping[str, ModelPlace]) -> Bound:
    """Whether the weights in front of us are those that a certificate speaks of.

    `places` are `before` and `after` in front of us. Of a strength search, `after` is the adapter that was scaled
    (`original_sha256`), and the scaled one lies in the certificate's `folder`.
    """
    before, after = record.bound["before_sha256"], record.bound["after_sha256"]
    if before == after:
        return Bound(Binding.ITSELF, "The certificate compares a model with itself.")
    strength = record.strength
    wanted = [("before", places["before"], before), ("after", places["after"], record.trained_sha256)]
    if strength is not None and strength["chosen"] is not None:
        scaled = ModelPlace(folder / Path(record.places["after"]).name)
        wanted.append(("after, at the certified strength", scaled, after))
    missing, trust = "", record.settings["trust_remote_code"]
    for side, place, expected in wanted:
        try:
            if isinstance(place.ref, Path):
                no_link(place.ref)
            content = content_at_hand(place.ref, revision=place.revision, trust_remote_code=trust)
        except (NotAtHandError, CheckpointError) as error:
            missing = missing or f"The model {side} was not at hand: {error.what}. What to do: {error.remedy}."
            continue
        if content != expected:
            return Bound(
                Binding.OTHER,
                f"The certificate is bound to another model {side} than the one here (sha256 {expected[:12]}, found "
                f"{content[:12]}).",
            )
    return Bound(Binding.NOT_AT_HAND, missing) if missing else Bound(Binding.SAME)


class NotAtHandError(ConfigError):
    """The weights are not on this machine, or cannot be read."""


def content_at_hand(ref: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> str:
    """sha256 of a model's content, of an adapter with its base; `NotAtHandError` where either is not here.

    `ref` is a folder, a hub id in the local cache, or `embedded`. With `trust_remote_code` the repository's code is
    counted; none of it runs.
    """
    from holdfast.models.content import content_of

    try:
        return content_of(ref, revision=revision, trust_remote_code=trust_remote_code, local_only=True).sha256
    except (HoldfastError, OSError, ValueError) as error:
        what = error.what if isinstance(error, HoldfastError) else type(error).__name__
        remedy = f"put {ref} where it was (a hub model: hf download {ref}), then ask again"
        raise NotAtHandError(f"the model {ref} cannot be read: {what}", remedy=remedy) from error
