"""What a finished run leaves besides its weights: it is measured, audits of every safety set, and result.json."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.auditing.results import MeasuredRole, write_run_audit
from holdfast.core import event_log
from holdfast.core.adapter_card import CARD_MARKER, loading_note
from holdfast.core.files import write_text
from holdfast.core.hashing import sha256_json
from holdfast.core.provenance import commit, hardware, versions
from holdfast.core.ranks import rank
from holdfast.core.units import KL_UNITS
from holdfast.data.encode import Encoded, template_sha256, tokenizer_sha256
from holdfast.models.content import ModelContent, content_of
from holdfast.records.result_values import ResultValues, SetFigures
from holdfast.records.run_record import write_result
from holdfast.runs.config.resolve import ResolvedRun
from holdfast.runs.stages.cost import Clock, cost
from holdfast.runs.stages.run_folder import RunFolder, disk_errors
from holdfast.scoring.completion import CompletionLosses
from holdfast.scoring.degradation import in_unit
from holdfast.scoring.forward import Forward
from holdfast.training.monitoring import barrier_figures, summarise
from holdfast.training.safety import SafetySet
from holdfast.training.trainer import SafeSFTTrainer, SafeTrainer

logger = logging.getLogger(__name__)

_Measured = dict[str, dict[str, MeasuredRole]]  # by safety set and role


@dataclass(frozen=True)
class Known:
    """What is known of a run before its trained model is measured: `data` counts rows, `screening` what it found."""

    steps: int
    seconds: float
    trust_remote_code: bool
    data: dict[str, Any]
    screening: dict[str, Any] | None


def measured_result(
    plan: ResolvedRun, trainer: SafeSFTTrainer, before: ModelContent | None, known: Known, clock: Clock | None = None
) -> ResultValues:
    """Measure the trained model; the first process, which has theta_0's content, writes the audits and result.json."""
    folder, started, monitor = RunFolder(plan.folder), time.monotonic(), trainer.behaviour_monitor
    if clock is None:
        clock = Clock()
    else:
        clock.ends("saving")
    measured = measure(trainer)
    clock.ends("measuring")
    spent = cost(clock.seconds, monitoring=0.0 if monitor is None else monitor.seconds)
    result: ResultValues = {
        "safety": summary(trainer, measured), "steps": known.steps, "seconds": known.seconds,
        "trust_remote_code": known.trust_remote_code, "data": known.data,
        "defense": {"name": trainer.defense.name, "constrains": trainer.defense.constrains},
        "step": trainer.run.engine_name, "step_declined": trainer.run.step_declined,
        "memory": trainer.run.fitting.figures(), "cost": spent,
        "spikes": {"discarded": trainer.recorder.spikes.total, "last_steps": trainer.recorder.spikes.steps},
        "config_sha256": plan.sha256, "versions": versions(), "commit": commit(), "hardware": hardware(),
    }  # fmt: skip
    if known.screening is not None:
        result["screening"] = known.screening
    watched = trainer.behaviour_result()
    if "behaviour" in watched:
        result["behaviour"] = watched["behaviour"]
    if "rolled_back_to" in watched:
        result["rolled_back_to"] = watched["rolled_back_to"]
    if before is None:
        return result
    result["barrier"] = barrier_figures(event_log.read(folder.events))
    with disk_errors(f"the audit in {folder.path}", folder.checkpoints):
        if (note := loading_note(folder.adapter)) is not None:  # the card that PEFT wrote names the wrong base
            write_text(folder.adapter / "README.md", f"{CARD_MARKER}\n\n# Adapter\n\n{note}\n")
            logger.warning(
                "%s stands on another adapter: its README.md says how to load it outside holdfast", folder.adapter
            )
        how = {"seconds": time.monotonic() - started, "trust_remote_code": known.trust_remote_code}
        result["audit_sha256"] = _audits(plan, trainer, measured, before, **how)
        return write_result(folder.path, result)


def measure(trainer: SafeSFTTrainer) -> _Measured:
    """Losses of the constraint and monitor examples now, per safety set. The certify split stays closed."""
    forward = trainer.run.forward

    def now(passing: Callable[..., CompletionLosses], held: SafetySet, examples: list[Encoded]) -> CompletionLosses:
        return trainer.run.fitting.evaluation(
            forward.batch_size, lambda rows: passing(forward.resized(rows), examples, held.constraint.first_k)
        )

    measured: _Measured = {}
    for name, held in trainer.safety.items():
        assert held.reference is not None  # training has measured theta_0
        if rank() == 0:
            logger.info("measuring the trained model on %d examples of %s", len(held.all_encoded), name)
        categories = {example.id: example.category for role in held.split.roles.values() for example in role}
        measured[name] = {}
        for role, examples in (("constraint", held.constraint_set), ("monitor", held.monitor_set)):
            if examples:
                ids = [example.id for example in examples]
                measured[name][role] = MeasuredRole(
                    ids, [categories[id_] for id_ in ids], [example.truncated for example in examples],
                    before=held.reference.rows(ids).losses, after=now(Forward.losses, held, examples),
                    kl=now(Forward.kl, held, examples) if held.constraint.unit in KL_UNITS else None,
                )  # fmt: skip
    return measured


def summary(trainer: SafeSFTTrainer, measured: _Measured) -> dict[str, SetFigures]:
    """Violation rates, g and CVaR per safety set; `feasible` where the rates of both splits are within alpha."""
    found: dict[str, SetFigures] = {}
    for name, held in trainer.safety.items():
        limit = held.constraint
        rates: dict[str, dict[str, float] | None] = dict.fromkeys(("constraint", "monitor"))
        for role, one in measured[name].items():  # D_i in the constraint's unit
            moved = in_unit(one.after, limit) - in_unit(one.before, limit)
            degradations = moved if one.kl is None else in_unit(one.kl, limit)
            rates[role] = summarise(degradations, held)
        found[name] = {
            "tau": limit.tau, "unit": limit.unit, "alpha": limit.alpha, "noise_floor": held.noise_floor,
            "constraint": rates["constraint"], "monitor": rates["monitor"],
            "feasible": all(rate["violation_rate"] <= limit.alpha for rate in rates.values() if rate),
        }  # fmt: skip
    return found


def _audits(
    plan: ResolvedRun, trainer: SafeTrainer, measured: _Measured, before: ModelContent, **how: Any
) -> dict[str, str]:
    """Write audit.parquet and audit.json of every safety set: each example before and after; returns their sha256."""
    config, folder, written = plan.config, RunFolder(plan.folder), {}
    trained = folder.model if config.lora is None else folder.adapter
    after = content_of(trained, trust_remote_code=how["trust_remote_code"])
    for name, held in trainer.safety.items():
        record, roles = held.split.record, measured[name]
        hashes = [record.sha256[role] for role in roles]
        written[name] = write_run_audit(
            held.folder(folder.path), roles, held.constraint,
            before={"ref": config.model, "sha256": before.sha256}, after={"ref": after.ref, "sha256": after.sha256},
            data={"source": config.safety[name].source, "sha256": sha256_json(hashes)},
            tokenizer_sha256=tokenizer_sha256(trainer.processing_class),
            template_sha256=template_sha256(trainer.processing_class),
            dtype=str(trainer.model.dtype).removeprefix("torch."), device=trainer.args.device.type,
            noise_floor=held.noise_floor, duplicates_dropped=record.duplicates_dropped, seconds=how["seconds"],
        ).sha256  # fmt: skip
    return written
