"""Verifying a certificate: everything in it is computed again from the files it names.

Checked are its own bytes and hash, the table's, every figure, sentence and verdict from the table, the content of both
models, the prompts and their membership in the data, a run's split record, stored replies and their classes, tokenizer
and template, and the ledger. A certificate that lies in a run's folder must be of that run's model.
What this cannot show is who issued it: whoever can change all files together can also write a certificate that fits
them. The sha256 that was printed at issue, kept elsewhere and given as `expect`, or a signature closes that gap.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.auditing.asking import require_replies
from holdfast.auditing.certificate_spec import claim_of, read_prompts
from holdfast.auditing.log_certificate import require_logs
from holdfast.certification.behaviour import Classes
from holdfast.certification.blocks import Screened
from holdfast.certification.openings import Ledger, ScopedLedger, default_ledger, scope_of, split_sha256
from holdfast.certification.terms import Rows
from holdfast.core.errors import CheckpointError, ConfigError, DataError, HoldfastError
from holdfast.core.hashing import sha256_file
from holdfast.core.library_types import Tokenizer
from holdfast.data.bundled import public_ids
from holdfast.data.encode import template_sha256, tokenizer_sha256
from holdfast.data.examples import Example
from holdfast.data.split_record import load_record
from holdfast.models.content import content_of, forget_hashes
from holdfast.models.handle import load_tokenizer
from holdfast.records.certificate import FILE_NAME, CertificateRecord, load_certificate
from holdfast.records.certificate_table import Table, claims_of, outcome_lines, read_stored, require_figures
from holdfast.records.stored_evidence import places_of
from holdfast.screening.certify_share import certify_share
from holdfast.screening.record import load_finished

_ISSUE = "it is not what the certificate was issued for: restore it, or certify again"


def verify(
    path: str | Path, *, before: str | Path | None = None, after: str | Path | None = None, prompts: str | None = None,
    ledger: Path | None = None, expect: str | None = None, key: Path | None = None, trust_remote_code: bool = False,
) -> CertificateRecord:  # fmt: skip
    """Recompute a certificate and everything it is bound to; returns it when all agrees.

    Args:
        path: the certificate, or the folder that holds it.
        before: where the model before is now, when it was moved; also tried as the base of an adapter.
        after: where the model after is now.
        prompts: where the prompts are now.
        ledger: where the ledger of openings is now; beside the prompts otherwise.
        expect: the certificate's sha256 as it was printed at issue.
        key: the public key, or a file of allowed signers, that the certificate must be signed with.
        trust_remote_code: let a tokenizer run its repository's code, where the certificate was issued with that; a
            certificate alone cannot ask for it.

    Raises:
        CheckpointError: naming what differs or is missing.
        ConfigError: it was issued with code of the models' repositories, which was not allowed to run.
    """
    path = Path(path).expanduser()
    path = path / FILE_NAME if path.is_dir() else path
    try:
        record = load_certificate(path)
        if expect is not None and record.sha256 != expect.strip().lower():
            what = f"{path} has sha256 {record.sha256}, expected {expect}"
            raise CheckpointError(what, remedy="this is another certificate than expected")
        if key is not None:
            from holdfast.certification.signing import verify_signature

            verify_signature(path, key)
        if record.settings["trust_remote_code"] and not trust_remote_code:
            raise ConfigError(
                f"{path} was issued with --trust-remote-code: to verify it, code of the models' repositories must run",
                remedy="add --trust-remote-code if you trust that code",
            )
        _verify_content(record, path.parent, before, after, prompts, ledger)
    except HoldfastError:
        raise
    except (KeyError, AttributeError, TypeError, ValueError, ArithmeticError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path}: its content cannot be used ({type(error).__name__})", remedy=_ISSUE) from error
    return record


def _verify_content(
    record: CertificateRecord, folder: Path, before: str | Path | None, after: str | Path | None, prompts: str | None,
    ledger: Path | None,
) -> None:  # fmt: skip
    table = read_stored(record, folder)
    require_figures(record, table)
    require_replies(record, table, folder)
    models = {"before": before or record.places["before"], "after": after or record.places["after"]}
    stated = Path(record.openings["ledger"])
    place = ledger or (default_ledger(prompts) if prompts is not None and not stated.is_file() else stated)
    if isinstance(table, Rows) and record.by == "log":
        _require_opening(record, table, Ledger(place), require_logs(record, table, *map(Path, models.values())))
        return
    forget_hashes()
    _require_models(record, models, moved=before)
    if after is None and (in_front := model_of_run(folder)) is not None:
        weights = _content(record, "after", in_front, before)
        if weights != record.trained_sha256:  # a certificate copied into another run's folder says nothing about it
            raise CheckpointError(
                f"the certificate is of {record.models['after']} (sha256 {record.trained_sha256}), and the model of "
                f"the run it lies in, {in_front}, has sha256 {weights}",
                remedy="a certificate speaks of one model: certify this one, or name the certified one with --after",
            )
    examples = _require_data(record, table, prompts or record.places["prompts"])
    _require_tokens(record, models, moved=before)
    book = Ledger(place)
    if record.screening is not None:  # public prompts were entered for this model and task
        scope = scope_of(record.bound["before_sha256"], record.screening["task_sha256"])
        book = ScopedLedger(place, scope, public_ids(examples))
    _require_opening(record, table, book, [example.id for example in examples])


def model_of_run(folder: Path) -> Path | None:
    """The model of the run whose folder (or whose safety set's folder) this is; None where it is no run's."""
    for run in (folder, folder.parent):
        if (run / "config.yaml").is_file():
            return next((run / name for name in ("adapter", "model") if (run / name).is_dir()), None)
    return None


def _content(record: CertificateRecord, side: str, ref: str | Path, moved: str | Path | None) -> str:
    """Content of a side; an adapter's base is looked for where it says, then where `before` was moved to."""
    options: dict[str, Any] = {"trust_remote_code": record.settings["trust_remote_code"]}
    options["revision"] = places_of(record)[side].revision
    try:
        return content_of(ref, **options).sha256
    except ConfigError as error:
        if moved is not None and side == "after":
            return content_of(ref, base=moved, **options).sha256
        what = f"the model {side} cannot be found: {error.what}"
        raise CheckpointError(what, remedy=f"name the place it was moved to with --{side}") from error


def _require_models(record: CertificateRecord, models: Mapping[str, str | Path], *, moved: str | Path | None) -> None:
    stated = {"before": record.bound["before_sha256"], "after": record.bound["after_sha256"]}
    for side, ref in models.items():
        _same(f"the model {side} ({ref})", stated[side], _content(record, side, ref, moved))
    if record.strength is None:
        return
    original = record.strength["original"]
    # The certified adapter is the one that was written; the one it was scaled from need not be kept.
    if original != record.places["after"] and Path(original).exists():
        whole = record.strength["original_sha256"]
        _same(f"the adapter at full strength ({original})", whole, _content(record, "after", original, moved))


def _require_data(record: CertificateRecord, rows: Table, source: str | None) -> list[Example]:
    """The prompts, in the table's order; their place in the data they came from, and a run's record of the split."""
    if source is None:
        raise CheckpointError(
            "the certificate names no file of prompts: it was issued on examples in memory",
            remedy="name the file with --prompts",
        )
    ids = list(dict.fromkeys(rows.ids))
    _same("the set of prompts", record.bound["split_sha256"], split_sha256(ids))
    shape: dict[str, Any] = {"template": record.settings["template"], "sequential": record.kind == "sequential"}
    shape["replies"] = record.by in ("behaviour", "harm")
    try:
        every = read_prompts(source, reading=record.settings["reading"], **shape)
        known = {example.id: example for example in every.examples}
        measured = [known[name] for name in ids]
    except KeyError as error:
        raise CheckpointError(f"the prompt {error} is not in {source}", remedy=_ISSUE) from None
    except (DataError, ConfigError, TypeError) as error:
        what = error.what if isinstance(error, HoldfastError) else "its settings are not those of holdfast"
        remedy = "name their place with --prompts"
        raise CheckpointError(f"the prompts cannot be read as they were: {what}", remedy=remedy) from error
    again = read_prompts(measured, source=source, **shape)
    _same(f"the data {source}", record.bound["data_sha256"], again.data_sha256)
    by_id = dict(zip(again.ids, zip(again.cluster, again.categories, strict=True), strict=True))
    stated = zip(rows.ids, rows.cluster.tolist(), rows.category, strict=True)
    if any(by_id[name] != (cluster, category) for name, cluster, category in stated):
        raise CheckpointError("the table's clusters or categories are not those of the prompts", remedy=_ISSUE)
    if shape["sequential"] and again.ids != ids:
        raise CheckpointError("the prompts are in another order than when they were measured", remedy=_ISSUE)
    place, stated_sha256 = record.places["splits"], record.bound["splits_sha256"]
    if place is None:
        if stated_sha256 is not None or record.screening is not None:
            raise CheckpointError("the certificate binds a split record but names none", remedy=_ISSUE)
        return measured
    what = "split record" if record.screening is None else "record of its screening"
    if not Path(place).is_file():
        raise CheckpointError(f"the run's {what} {place} is missing", remedy=_ISSUE)
    _same(f"the run's {what} {place}", stated_sha256, sha256_file(Path(place)))
    if record.screening is not None:
        _require_share(record, record.screening, rows, measured, Path(place))
    elif set(ids) != set(load_record(Path(place).parent).ids["certify"]):
        raise CheckpointError(f"the prompts are not the certify share of {place}", remedy=_ISSUE)
    return measured


def _require_share(
    record: CertificateRecord, stated: Screened, table: Table, examples: list[Example], place: Path
) -> None:
    """What the certificate says of screening follows from its record, and the prompts are its certify share."""
    if len(public_ids(examples)) != stated["public"]:
        raise CheckpointError(
            f"{len(public_ids(examples))} of the certificate's prompts ship with this version of holdfast, and it says "
            f"{stated['public']}",
            remedy=f"verify with the version that issued it: holdfast {record.versions.get('holdfast', 'as recorded')}",
        )
    screening, made = load_finished(place.parent)
    names = [name for name in stated["sets"] if name in screening.sets and name in made["sets"]]
    share = certify_share(screening, {name: made["sets"][name]["keep"] for name in names}, made["task_content_sha256"])
    if share.block() != stated:
        raise CheckpointError(f"the certificate's figures of screening are not those of {place}", remedy=_ISSUE)
    if set(share.keep) != {example.id for example in examples}:
        raise CheckpointError(f"the prompts are not the certify share in {place}", remedy=_ISSUE)
    kept = table.keep if isinstance(table, Classes) else None
    if kept is not None and list(kept) != [share.keep[name] for name in table.ids]:
        raise CheckpointError(f"what the table's prompts keep is not what {place} says", remedy=_ISSUE)


def _require_tokens(record: CertificateRecord, models: Mapping[str, str | Path], *, moved: str | Path | None) -> None:
    sides = {"own": ("before", "after"), "after": ("after",)}.get(record.settings["tokenizer"], ("before",))
    tokenizers = [_tokenizer(record, side, models[side], moved) for side in sides]
    bound = record.bound
    for name, stated, digest in (
        ("tokenizer", bound["tokenizer_sha256"], tokenizer_sha256),
        ("template", bound["template_sha256"], template_sha256),
    ):
        digests = [digest(tokenizer) for tokenizer in tokenizers]
        _same(f"the {name}", stated, "+".join(digests) if "+" in stated else digests[0])


def _tokenizer(record: CertificateRecord, side: str, ref: str | Path, moved: str | Path | None) -> Tokenizer:
    trust = bool(record.settings["trust_remote_code"])
    try:
        return load_tokenizer(ref, revision=places_of(record)[side].revision, trust_remote_code=trust)
    except ConfigError as error:
        if moved is None:
            raise CheckpointError(f"the tokenizer cannot be found: {error.what}", remedy=error.remedy) from error
        return load_tokenizer(moved, trust_remote_code=trust)


def _require_opening(record: CertificateRecord, rows: Table, ledger: Ledger, ids: list[str]) -> None:
    kept = rows.keep if isinstance(rows, Classes) else None
    keep = None if kept is None else dict(zip(rows.ids, kept, strict=True))
    models = record.bound["before_sha256"], record.trained_sha256
    claim = claim_of(record, *models, claims_of(record), dict(zip(rows.ids, rows.category, strict=True)), keep)
    _same("the claim entered in the ledger", record.openings["claim"], claim.sha256)
    if not ledger.path.is_file():
        raise CheckpointError(f"the ledger of openings {ledger.path} is missing", remedy="name its place with --ledger")
    require_entered(record, rows, ids, ledger)


def require_entered(record: CertificateRecord, table: Table, ids: list[str], ledger: Ledger) -> None:
    """The ledger holds the opening that the certificate names, and it came to what the table says."""
    entry = ledger.find(record.openings["claim"], ids)
    stated = (record.openings["declared"], record.openings["this"])
    if entry is None or (entry.declared, entry.number) != stated:
        entered = "none" if entry is None else f"number {entry.number} of {entry.declared}"
        raise CheckpointError(
            f"{ledger.path}: expected opening number {stated[1]} of {stated[0]} for this claim, found {entered}",
            remedy="restore the ledger that the certificate was entered in, or certify again into another folder",
        )
    if not ledger.came_to(record.openings["claim"], ids, outcome_lines(table, record.tau)):
        what = f"{ledger.path}: this opening came to something else than the certificate's table says"
        raise CheckpointError(what, remedy="restore the table and the certificate that were issued")


def _same(what: str, expected: str | None, found: str) -> None:
    if expected != found:
        raise CheckpointError(f"{what} was changed: expected sha256 {expected}, found {found}", remedy=_ISSUE)
