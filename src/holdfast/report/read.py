"""A run folder, or the output of an audit or certification, as `Evidence`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from holdfast.core import event_log
from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.core.redaction import redact
from holdfast.data.split_record import load_record
from holdfast.report.audits import Reading, choose
from holdfast.report.certificate import read_certificate
from holdfast.report.evidence import SINGLE, Evidence, Figures, Limit, Missing, SafetyEvidence, Source
from holdfast.report.fields import Fields, read_object
from holdfast.report.table import Table, read_table

PIECES = ("config.yaml", "events.jsonl", "result.json", "audit.json", "audit.parquet", "certificate.json")


def read_evidence(folder: Path) -> Evidence:
    """Read what is there; what is absent is listed in `missing`.

    Raises:
        ConfigError: the folder does not exist or holds none of the pieces.
        CheckpointError: a piece is damaged, or two contradict each other.
    """
    _require_evidence(folder)
    config = _config(folder / "config.yaml")
    events = _events(folder / "events.jsonl")
    result = read_object(folder / "result.json")
    blocks = _safety_blocks(config)
    measured = result.objects("safety") if result is not None else {}
    names = list(blocks) or list(measured) or [SINGLE]
    sets = []
    for name in names:
        inside = folder / name if len(names) > 1 or name != SINGLE else folder
        sets.append(_safety(name, inside, blocks.get(name), _limits(config, name), measured.get(name)))
    found = tuple(sets)
    missing = _missing(folder, config, events, result, found)
    return Evidence(folder, folder.resolve().name, config, events, result, found, missing)


def _require_evidence(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder; expected a run folder, or the output folder of an audit",
            remedy="give the output_dir of `holdfast train`, or the --output of `holdfast audit` or `holdfast certify`",
        )
    if (folder / "study.json").is_file():
        raise ConfigError(
            f"{folder} is the output_dir of a study; expected a run folder, or the output folder of an audit",
            remedy=f"holdfast report {folder} --tables shows a study",
        )
    if not any((folder / piece).exists() for piece in PIECES):
        raise ConfigError(
            f"{folder} holds nothing to report: none of {', '.join(PIECES)}",
            remedy="give the output_dir of `holdfast train`, or the --output of `holdfast audit` or `holdfast certify`",
        )


def _config(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise CheckpointError(
            f"{path} cannot be read as YAML ({type(error).__name__})", remedy="restore the file from a backup"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold settings", remedy="restore the file from a backup")
    settings: dict[str, Any] = redact(value)
    return settings


def _events(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    rows = event_log.read(path)
    for number, row in enumerate(rows, start=1):
        Fields(row, f"{path}:{number}").count("step")
    return rows


def _safety_blocks(config: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    block = (config or {}).get("safety")
    if not isinstance(block, Mapping):
        return {}
    if isinstance(block.get("data"), str):
        return {SINGLE: block}
    return {str(name): inner for name, inner in block.items() if isinstance(inner, Mapping)}


def _limits(config: Mapping[str, Any] | None, name: str) -> Mapping[str, Any] | None:
    block = (config or {}).get("constraint")
    if not isinstance(block, Mapping):
        return None
    inner = block if "tau" in block else block.get(name)
    return inner if isinstance(inner, Mapping) else None


def _safety(
    name: str,
    folder: Path,
    block: Mapping[str, Any] | None,
    constraint: Mapping[str, Any] | None,
    measured: Fields | None,
) -> SafetyEvidence:
    by_training = _audit(folder, constraint) or _result(measured, constraint)
    choice = choose(by_training, _audit(folder / "audit", constraint))
    shown = choice.shown
    audit = shown.audit if shown is not None else None
    # The run's own limit where nothing was measured.
    limit = shown.limit if shown else _limit(Fields(constraint, "config.yaml, constraint:")) if constraint else None
    certificate = read_certificate(folder / "certificate.json", audit)
    floor = audit if audit is not None and "noise_floor" in audit else measured
    return SafetyEvidence(
        name=name,
        folder=folder,
        limit=limit if limit is not None else certificate.limit if certificate else None,
        noise_floor=floor.number("noise_floor", default=float("nan")) if floor is not None else float("nan"),
        figures=shown.figures if shown is not None else (),
        origin=choice.origin,
        beside=choice.beside,
        beside_origin=choice.beside_origin,
        audits_note=choice.note,
        units=_units(audit),
        audit=audit,
        behaviour=choice.behaviour,
        table=shown.table if shown is not None else None,
        certificate=certificate,
        source=_source(block, audit),
        closed=_closed(folder),
    )


def _audit(folder: Path, constraint: Mapping[str, Any] | None) -> Reading | None:
    """The audit in a folder: its table and its summary, which the table holds too."""
    table = read_table(folder / "audit.parquet")
    audit = read_object(folder / "audit.json")
    if audit is None and table is not None and table.audit is not None:
        audit = Fields(redact(table.audit), f"{folder / 'audit.parquet'}, metadata:")
    if audit is None:
        return None
    figures = _from_audit(audit)
    _require_agreement(folder, figures, table)
    return Reading(_limit(audit, constraint), figures, audit, table)


def _result(measured: Fields | None, constraint: Mapping[str, Any] | None) -> Reading | None:
    """What training measured, where its audit is gone."""
    return Reading(_limit(measured, constraint), _from_result(measured)) if measured is not None else None


def _limit(found: Fields, constraint: Mapping[str, Any] | None = None) -> Limit:
    first_k = int(found.number("first_k", default=float((constraint or {}).get("first_k", 8))))
    return Limit(found.number("tau"), found.share("alpha"), found.text("unit"), first_k)


def _from_audit(audit: Fields) -> tuple[Figures, ...]:
    roles = audit.objects("roles") or {audit.text("role"): audit}
    return tuple(_figures(role, found, found.count("violations")) for role, found in roles.items())


def _from_result(measured: Fields) -> tuple[Figures, ...]:
    found = {role: measured.inner(role) for role in ("monitor", "constraint") if role in measured}
    return tuple(
        _figures(role, one, round(one.share("violation_rate") * one.count("n"))) for role, one in found.items()
    )


def _figures(role: str, found: Fields, violations: int) -> Figures:
    quantiles = found.inner("quantiles") if "quantiles" in found else None
    return Figures(
        role=role,
        n=found.count("n"),
        violations=violations,
        rate=found.share("violation_rate"),
        upper=found.share("violation_upper"),
        cvar=found.number("cvar"),
        mean=found.number("mean", default=float("nan")),
        quantiles={str(key): quantiles.number(key) for key in quantiles.value} if quantiles else {},
    )


def _units(audit: Fields | None) -> dict[str, dict[str, float]]:
    """Per unit: quantiles, cvar and mean of the headline split."""
    found = {}
    for unit, values in (audit.objects("units") if audit else {}).items():
        quantiles = values.inner("quantiles")
        found[unit] = {str(key): quantiles.number(key) for key in quantiles.value}
        found[unit] |= {key: values.number(key) for key in ("cvar", "mean")}
    return found


def _require_agreement(folder: Path, figures: tuple[Figures, ...], table: Table | None) -> None:
    """The counts of the table are the counts of the summary, or one of the files is not what it says."""
    if table is None:
        return
    for one in figures:
        mask = table.roles == one.role
        counted = (int(mask.sum()), int(table.violated[mask].sum()))
        if counted != (one.n, one.violations):
            raise CheckpointError(
                f"{folder}: audit.parquet has {counted[1]} violations of {counted[0]} {one.role} examples, its summary "
                f"has {one.violations} of {one.n}",
                remedy="one of the two files was changed: run `holdfast audit` again, or restore them",
            )


def _source(block: Mapping[str, Any] | None, audit: Fields | None) -> Source | None:
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


def _closed(folder: Path) -> frozenset[str]:
    if not (folder / "splits.json").exists():
        return frozenset()
    return frozenset(load_record(folder).ids["certify"])


def _missing(
    folder: Path,
    config: Mapping[str, Any] | None,
    events: list[dict[str, Any]],
    result: Fields | None,
    sets: tuple[SafetyEvidence, ...],
) -> tuple[Missing, ...]:
    trained = config is not None or bool(events) or result is not None
    found = []
    if trained and result is None:
        found.append(Missing("No result.json: the run is not finished.", "holdfast train RUN.yaml --resume"))
    if trained and config is None:
        found.append(Missing("No config.yaml: the settings of the run are unknown.", "holdfast train RUN.yaml"))
    if trained and not events:
        found.append(Missing("No events.jsonl: the course of training is unknown.", "holdfast train RUN.yaml"))
    audit = f"holdfast audit {folder}" if trained else "holdfast audit --before A --after B --safety FILE"
    if any(one.table is None for one in sets):
        found.append(Missing("No audit.parquet: the degradation of single examples is unknown.", audit))
    if any(one.certificate is None for one in sets):
        certify = f"holdfast certify {folder}" if trained else "holdfast certify --before A --after B --safety FILE"
        found.append(Missing("No certificate.json: the claim was measured, not certified.", certify))
    return tuple(found)
