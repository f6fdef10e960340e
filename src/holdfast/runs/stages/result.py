"""What a finished run leaves besides its weights: audits of every safety set, and result.json."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.auditing.finishing import MeasuredRole, write_run_audit
from holdfast.core.adapter_card import CARD_MARKER, loading_note
from holdfast.core.files import write_text
from holdfast.core.hashing import sha256_json
from holdfast.core.provenance import commit, hardware, versions
from holdfast.data.encode import template_sha256, tokenizer_sha256
from holdfast.models.content import ModelContent, content_of
from holdfast.records.run_record import write_result
from holdfast.runs.config import RunConfig
from holdfast.runs.config.resolve import ResolvedRun
from holdfast.runs.stages.finetune import RoleLosses, measure, summary
from holdfast.runs.stages.run_folder import RunFolder, disk_errors
from holdfast.training.trainer import SafeSFTTrainer

logger = logging.getLogger(__name__)


def measured_result(
    plan: ResolvedRun, trainer: SafeSFTTrainer, before: ModelContent | None, known: dict[str, Any]
) -> dict[str, Any]:
    """Measure the trained model; the first process, which has theta_0's content, writes the audits and result.json."""
    folder, started = RunFolder(plan.folder), time.monotonic()
    measured = measure(trainer)
    result = {
        "safety": summary(trainer, measured),
        **known,
        **trainer.behaviour_result(),
        "defense": {"name": trainer.defense.name, "constrains": trainer.defense.constrains},
        "step": trainer.run.engine_name,
        "step_declined": trainer.run.step_declined,
        "memory": trainer.run.fitting.figures(),
        "spikes": {"discarded": trainer.recorder.spikes.total, "last_steps": trainer.recorder.spikes.steps},
        "config_sha256": plan.sha256,
        "versions": versions(),
        "commit": commit(),
        "hardware": hardware(),
    }
    if before is None:
        return result
    with disk_errors(f"the audit in {folder.path}", folder.checkpoints):
        if (note := loading_note(folder.adapter)) is not None:  # the card that PEFT wrote names the wrong base
            write_text(folder.adapter / "README.md", f"{CARD_MARKER}\n\n# Adapter\n\n{note}\n")
            logger.warning(
                "%s stands on another adapter: its README.md says how to load it outside holdfast", folder.adapter
            )
        seconds, trusted = time.monotonic() - started, known["trust_remote_code"]
        result["audit_sha256"] = write_audits(
            plan.config, trainer, measured, before, seconds=seconds, trust_remote_code=trusted
        )
        return write_result(folder.path, result)


def write_audits(
    config: RunConfig,
    trainer: Any,
    measured: Mapping[str, Mapping[str, RoleLosses]],
    before: ModelContent,
    *,
    seconds: float,
    trust_remote_code: bool = False,
) -> dict[str, str]:
    """Write audit.parquet and audit.json of every safety set: each example before and after; returns their sha256."""
    folder = RunFolder(Path(config.output_dir))
    trained = folder.model if config.lora is None else folder.adapter
    after = content_of(trained, trust_remote_code=trust_remote_code)
    written = {}
    for name, held in trainer.safety.items():
        record = held.split.record
        categories = {example.id: example.category for role in held.split.roles.values() for example in role}
        roles = {
            role: MeasuredRole(
                ids=[example.id for example in losses.examples],
                categories=[categories[example.id] for example in losses.examples],
                truncated=[example.truncated for example in losses.examples],
                before=losses.before,
                after=losses.after,
                kl=losses.kl,
            )
            for role, losses in measured[name].items()
        }
        written[name] = write_run_audit(
            held.folder(folder.path), roles, held.constraint,
            before={"ref": config.model, "sha256": before.sha256}, after={"ref": after.ref, "sha256": after.sha256},
            data={
                "source": config.safety[name].source, "sha256": sha256_json([record.sha256[role] for role in roles])
            },
            tokenizer_sha256=tokenizer_sha256(trainer.processing_class),
            template_sha256=template_sha256(trainer.processing_class),
            dtype=str(trainer.model.dtype).removeprefix("torch."), device=trainer.args.device.type,
            noise_floor=held.noise_floor, duplicates_dropped=record.duplicates_dropped, seconds=seconds,
        ).sha256  # fmt: skip
    return written
