"""A run folder, or the output of an audit or certification, as `Evidence`."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from holdfast.core import event_log
from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.core.file_lock import writer_of
from holdfast.core.files import read_plain_file
from holdfast.core.redaction import redact
from holdfast.data.split_record import RECORD_NAME, load_record
from holdfast.records import stored_evidence
from holdfast.records.audit_folder import SUMMARY_NAME, StoredAudit
from holdfast.records.certificate import FILE_NAME, CertificateRecord
from holdfast.records.run_record import CONFIG_NAME, SINGLE, is_there, no_link, require_name, set_folder
from holdfast.records.stored_evidence import ModelPlace
from holdfast.records.yaml_file import parse_stored_yaml
from holdfast.reporting.evidence import (
    CertificateFigures,
    Evidence,
    Figures,
    Limit,
    Reading,
    SafetyEvidence,
    Source,
    choose,
)
from holdfast.reporting.fields import Fields
from holdfast.reporting.wording import one_line

WHY_LENGTH = 600
PIECES = ("config.yaml", "events.jsonl", "result.json", "audit.json", "audit.parquet", "certificate.json")


def read_evidence(folder: Path) -> Evidence:
    """Read what is there; what is absent is listed in `missing`.

    Raises:
        ConfigError: the folder does not exist or holds none of the pieces.
        CheckpointError: a piece is damaged, or two contradict each other.
    """
    _require_evidence(folder)
    stored = stored_evidence.believed_result(folder)
    config, events = _config(folder / CONFIG_NAME), _events(folder / "events.jsonl")
    result = Fields(redact(stored), str(folder / "result.json")) if stored is not None else None
    blocks = _safety_blocks(config)
    measured = result.objects("safety") if result is not None else {}
    names = list(blocks) or list(measured) or [SINGLE]
    weights = _weights(folder, config) if config or events or result else None
    sets = []
    for name in names:
        inside = set_folder(folder, name, named=names != [SINGLE])
        limits = _limits(config, name)
        sets.append(_safety(name, inside, blocks.get(name), limits, measured.get(name), stored, weights))
    writer = writer_of(folder) if result is None else None
    found = Evidence(folder, folder.resolve().name, config, events, result, tuple(sets), writer=writer)
    return replace(found, missing=_missing(found))


def _weights(folder: Path, config: Mapping[str, Any] | None) -> dict[str, ModelPlace]:
    """The model that a run started from, and the adapter or model that lies in its folder."""
    model, revision = (config or {}).get("model"), (config or {}).get("revision")
    before = ModelPlace(model if isinstance(model, str) else "", revision if isinstance(revision, str) else None)
    trained = next((folder / name for name in ("adapter", "model") if (folder / name).exists()), folder / "adapter")
    return {"before": before, "after": ModelPlace(trained)}


def _require_evidence(folder: Path) -> None:
    expected = "expected a run folder, or the output folder of an audit"
    give = "give the output_dir of `holdfast train`, or the --output of `holdfast audit` or `holdfast certify`"
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; {expected}", remedy=give)
    if (folder / "study.json").is_file():
        remedy = f"holdfast tables {folder} shows a study"
        raise ConfigError(f"{folder} is the output_dir of a study; {expected}", remedy=remedy)
    if not any(is_there(folder / piece) for piece in PIECES):
        raise ConfigError(f"{folder} holds nothing to report: none of {', '.join(PIECES)}", remedy=give)


def _config(path: Path) -> dict[str, Any] | None:
    if not is_there(path):
        return None
    data = read_plain_file(path, remedy="restore the file from a backup")
    return dict(redact(parse_stored_yaml(data, path)))


def _events(path: Path) -> list[dict[str, Any]]:
    if not is_there(path):
        return []
    try:
        rows = event_log.read(no_link(path))
    except (OSError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__})", remedy="restore the file from a backup"
        ) from error
    for number, row in enumerate(rows, start=1):
        Fields(row, f"{path}:{number}").count("step")
    return rows


def _safety_blocks(config: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    block = (config or {}).get("safety")
    if not isinstance(block, Mapping):
        return {}
    if isinstance(block.get("data"), str) or isinstance(block.get("prompts"), list):
        return {SINGLE: block}
    return {require_name(name, CONFIG_NAME): inner for name, inner in block.items() if isinstance(inner, Mapping)}


def _limits(config: Mapping[str, Any] | None, name: str) -> Mapping[str, Any] | None:
    block = (config or {}).get("constraint")
    if not isinstance(block, Mapping):
        return None
    inner = block if "tau" in block else block.get(name)
    return inner if isinstance(inner, Mapping) else None


def _safety(
    name: str, folder: Path, block: Mapping[str, Any] | None, constraint: Mapping[str, Any] | None,
    measured: Fields | None, result: Mapping[str, Any] | None, weights: Mapping[str, ModelPlace] | None,
) -> SafetyEvidence:  # fmt: skip
    split = load_record(folder) if is_there(folder / RECORD_NAME) else None
    trained = _audit(stored_evidence.believed_run_audit(folder, name, result), folder, constraint)
    if trained is None and measured is not None:  # the audit is gone: what training counted
        trained = Reading(_limit(measured, constraint), _from_result(measured))
    inside = folder / "audit"
    has_later = inside.is_symlink() or is_there(inside / SUMMARY_NAME)
    later = stored_evidence.believed_audit(inside, split=split) if has_later else None
    choice = choose(trained, _audit(later, inside, constraint))
    shown = choice.shown
    audit = shown.audit if shown is not None else None
    # The run's own limit where nothing was measured.
    limit = shown.limit if shown else _limit(Fields(constraint, "config.yaml, constraint:")) if constraint else None
    certificate = _certificate(folder, audit, weights)
    floor = audit if audit is not None and "noise_floor" in audit else measured
    return SafetyEvidence(
        name, folder, limit if limit is not None else certificate.limit if certificate else None,
        noise_floor=floor.number("noise_floor", optional=True) if floor is not None else float("nan"),
        figures=shown.figures if shown is not None else (), origin=choice.origin, beside=choice.beside,
        beside_origin=choice.beside_origin, audits_note=choice.note, units=_units(audit), audit=audit,
        behaviour=choice.behaviour, table=shown.table if shown is not None else None, certificate=certificate,
        source=_source(block, audit, folder), closed=frozenset(split.ids["certify"] if split is not None else ()),
        keep=str((block or {}).get("keep") or ""),
    )  # fmt: skip


def _certificate(
    folder: Path, audit: Fields | None, weights: Mapping[str, ModelPlace] | None
) -> CertificateFigures | None:
    """The certificate in a folder, None where there is none.

    The file's own sha256, its figures from the table and the content of both models (of the run, or where there is no
    run where the certificate says they are) are checked here; whether it still fits the prompts and the ledger is what
    `holdfast verify` recomputes.
    """
    record = stored_evidence.believed_certificate(folder)
    if record is None:
        return None
    checked = stored_evidence.bound(record, folder, weights or stored_evidence.places_of(record))
    checked = replace(checked, why=one_line(redact(checked.why), WHY_LENGTH))
    same = audit is None or record.trained_sha256 == audit.inner("after").text("sha256", "")
    if record.certified and record.kind in ("fixed", "finite_pool") and not record.upper_bound <= record.alpha:
        raise CheckpointError(
            f"{folder / FILE_NAME} says certified, but its bound {record.upper_bound:g} is over alpha {record.alpha:g}",
            remedy="the file was changed: run `holdfast verify` on it",
        )
    values = redact(record.to_json())
    shown = CertificateRecord(**{field.name: values[field.name] for field in fields(record)})
    return CertificateFigures(shown, record.sha256, checked, same)


def _audit(found: StoredAudit | None, folder: Path, constraint: Mapping[str, Any] | None) -> Reading | None:
    if found is None:
        return None
    audit = Fields(redact(found.values), str(folder / SUMMARY_NAME))
    roles = audit.objects("roles") or {audit.text("role"): audit}
    figures = tuple(_figures(role, one, one.count("violations")) for role, one in roles.items())
    return Reading(_limit(audit, constraint), figures, audit, found.table)


def _limit(found: Fields, constraint: Mapping[str, Any] | None = None) -> Limit:
    held = found if "first_k" in found else Fields(constraint or {}, f"{CONFIG_NAME}, constraint:")
    first_k = held.count("first_k") if "first_k" in held else 8
    return Limit(found.number("tau"), found.share("alpha"), found.text("unit"), first_k)


def _from_result(measured: Fields) -> tuple[Figures, ...]:
    found = {role: measured.inner(role) for role in ("monitor", "constraint") if role in measured}
    return tuple(
        _figures(role, one, round(one.share("violation_rate") * one.count("n"))) for role, one in found.items()
    )


def _figures(role: str, found: Fields, violations: int) -> Figures:
    return Figures(
        role, found.count("n"), violations, rate=found.share("violation_rate"), upper=found.share("violation_upper"),
        cvar=found.number("cvar"), mean=found.number("mean", optional=True),
        quantiles=_numbers(found.inner("quantiles")) if "quantiles" in found else {},
    )  # fmt: skip


def _numbers(found: Fields) -> dict[str, float]:
    return {str(key): found.number(key) for key in found.value}


def _units(audit: Fields | None) -> dict[str, dict[str, float]]:
    units = audit.objects("units") if audit else {}
    return {
        unit: _numbers(values.inner("quantiles")) | {key: values.number(key) for key in ("cvar", "mean")}
        for unit, values in units.items()
    }


def _source(block: Mapping[str, Any] | None, audit: Fields | None, folder: Path) -> Source | None:
    """Where the examples' text lies; of a set that was built by asking, in the run's folder or, named, in its own."""
    if block is not None and isinstance(block.get("prompts"), list):
        inside = (place / "screening" / "held.jsonl" for place in (folder, folder.parent))
        return Source(str(next((path for path in inside if path.is_file()), "")), asked=True)
    if block is not None and isinstance(block.get("data"), str):
        columns, limit = block.get("columns"), block.get("limit")
        return Source(
            str(block["data"]),
            {str(k): str(v) for k, v in columns.items()} if isinstance(columns, Mapping) else None,
            limit if isinstance(limit, int) else None,
        )
    if audit is not None and "data" in audit:
        return Source(audit.inner("data").text("source", ""))
    return None


def _missing(found: Evidence) -> tuple[tuple[str, str], ...]:
    trained, train = found.trained, "holdfast train RUN.yaml"
    audit = f"holdfast audit {found.folder}" if trained else "holdfast audit --before A --after B --safety FILE"
    certify = f"holdfast certify {found.folder}" if trained else "holdfast certify --before A --after B --prompts FILE"
    # Of a run that holds refusals and answers, the certificate of refusals is the run's.
    uncertified = any(one.certificate is None for one in found.sets if one.keep != "answers")
    unlisted = any(one.table is None for one in found.sets)
    pieces = (
        (found.unfinished and not found.writer, "No result.json: the run is not finished.", f"{train} --resume"),
        (bool(found.writer), "No result.json: the run is going on.", f"holdfast report {found.folder}"),
        (trained and found.config is None, "No config.yaml: the settings of the run are unknown.", train),
        (trained and not found.events, "No events.jsonl: the course of training is unknown.", train),
        (unlisted, "No audit.parquet: the degradation of single examples is unknown.", audit),
        (uncertified, "No certificate.json: the claim is not certified.", certify),
    )
    return tuple((what, command) for absent, what, command in pieces if absent)
