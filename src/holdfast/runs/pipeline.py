"""A run from top to bottom: settings, folder, data, model, constrained training, measurement, result."""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.auditing.finishing import MeasuredRole, write_run_audit
from holdfast.constraint.feasibility import require_feasible_start
from holdfast.core.adapter_card import CARD_MARKER, loading_note
from holdfast.core.errors import ConfigError
from holdfast.core.file_lock import RunLock
from holdfast.core.files import write_text
from holdfast.core.hashing import sha256_json
from holdfast.core.provenance import commit, hardware, versions
from holdfast.core.ranks import gather_objects
from holdfast.data.encode import template_sha256, tokenizer_sha256
from holdfast.data.templates import use_template
from holdfast.models.adapter import adapter_folder, base_of
from holdfast.models.alignment_shift import require_merged
from holdfast.models.content import ModelContent, content_of
from holdfast.models.handle import load_pair
from holdfast.models.source import resolve as resolve_model
from holdfast.models.unmerged import load_adapter_pair
from holdfast.records.run_record import write_result
from holdfast.runs.config import RunConfig
from holdfast.runs.config.resolve import ResolvedRun, data_arguments, peft_config, resolve
from holdfast.runs.stages.certifiable import close_shares, warn_about_data, warn_of_shares
from holdfast.runs.stages.finetune import Interruption, Listener, RoleLosses, build_trainer, measure, summary, train
from holdfast.runs.stages.prepare import Prepared, hold, prepare, row_counts, share_scope, with_screening
from holdfast.runs.stages.run_folder import RunFolder, disk_errors, whole_folder
from holdfast.screening.screen import Screening
from holdfast.training.trainer import SafeSFTTrainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """What a finished run leaves: its folder, and the content of its result.json."""

    folder: Path
    values: dict[str, Any]

    @property
    def feasible(self) -> bool:
        """Whether every monitored violation rate is within its alpha, and no figure of the behaviour monitor failed."""
        watched = self.values.get("behaviour", {}).values()
        held = all(entry["feasible"] for entry in self.values["safety"].values())
        return held and all(figure["passed"] for figure in watched)


def run(
    config: RunConfig, *, resume: bool = False, listeners: Sequence[Listener] = (), trust_remote_code: bool = False
) -> RunResult:
    """Fine-tune under the constraint and write the run folder.

    Args:
        config: from `load_config` or `config_from_dict`.
        resume: continue this run from its newest checkpoint; a finished run only returns its result.
        listeners: called once a step; they replace the trainer's own progress output.
        trust_remote_code: let the model repository run its own code; needs a pinned revision.

    Raises:
        InfeasibleError: the constraint does not hold for the unchanged model.
        CheckpointError: the folder belongs to a run with other settings, or is in use.
        KeyboardInterrupt: a signal asked to stop; a checkpoint was saved if training had begun.
    """
    plan = resolve(config)
    for limit in plan.constraints.values() if plan.defense.constrains else ():
        require_feasible_start(limit)
    folder, main = RunFolder(plan.folder), plan.arguments.process_index == 0
    with ExitStack() as stack:
        if main:  # the lock is taken before anything is made, and held until what a refused run made is removed
            lock = stack.enter_context(RunLock(folder.path))
            stack.enter_context(folder.kept_if_started(made=lock.made))
        interruption = stack.enter_context(Interruption())
        folder.require_free(plan.values, resume=resume)
        if (finished := folder.finished()) is not None:
            return RunResult(folder.path, finished)
        data = read_data(config)
        if main:
            warn_about_data(plan, data)
        model, tokenizer, adapter = load_start(config, trust_remote_code)
        before = None
        if main:
            # Now, not at the end: a folder may change while training runs.
            before = content_of(config.model, revision=config.revision, trust_remote_code=trust_remote_code)
            folder.write_config(plan.values)
        data, screening = ask_theta_0(plan, data, (model, tokenizer), before, listeners)
        trainer = build_trainer(
            model=model, tokenizer=tokenizer, data=data, constraints=plan.constraints, defense=plan.defense,
            arguments=plan.arguments, peft_config=adapter, unaligned=unaligned_of(plan, trust_remote_code),
            callbacks=[interruption], listeners=listeners if main else (),
        )  # fmt: skip
        if screening is not None and screening.monitor.any:
            trainer.watch_behaviour(
                screening.monitor, plan.behaviour_limits, every=config.monitor.every, template=config.template
            )
        goes_on = resume and folder.has_checkpoints()
        if resume and not goes_on:
            logger.warning("nothing to resume in %s: the run starts anew", folder.path)
        steps, seconds = train(trainer, resume=goes_on)
        if interruption.requested:
            raise KeyboardInterrupt
        final = folder.model if config.lora is None else folder.adapter
        with disk_errors(str(final), folder.checkpoints), whole_folder(final) as staged:
            trainer.save_model(str(staged))
        known = {"steps": steps, "seconds": round(seconds, 3), "data": row_counts(data)}
        known |= {"trust_remote_code": trust_remote_code}
        known |= {} if screening is None else {"screening": screening.figures()}
        return RunResult(folder.path, measured_result(plan, trainer, before, known))


def read_data(config: RunConfig) -> Prepared:
    """Read the task and safety data of a run and split the latter."""
    return prepare(**data_arguments(config))


def load_start(config: RunConfig, trust_remote_code: bool) -> tuple[Any, Any, Any]:
    """theta_0, its tokenizer with the run's template, and the adapter to put on it (None: nothing new is put on)."""
    wanted = peft_config(config)
    options: dict[str, Any] = {
        "dtype": config.dtype, "revision": config.revision, "quantization": config.quantization,
        "trust_remote_code": trust_remote_code,
    }  # fmt: skip
    if config.adapter_policy == "merge":
        model, tokenizer = load_pair(config.model, **options)
    else:
        model, tokenizer = load_adapter_pair(config.model, wanted, **options)
        wanted = None
    use_template(tokenizer, config.template)
    return model, tokenizer, wanted


def ask_theta_0(
    plan: ResolvedRun,
    data: Prepared,
    theta_0: tuple[Any, Any],
    before: ModelContent | None,
    listeners: Sequence[Listener],
) -> tuple[Prepared, Screening | None]:
    """The run's data after asking its model, and the screening; as they were where nothing is asked.

    `before` is theta_0's content on the first process; the others need not hash the model.
    """
    main = before is not None
    if plan.screening is None:
        if main:
            close_shares(plan.config, data)
        return data, None
    folder = RunFolder(plan.folder)
    digest = gather_objects("" if before is None else before.sha256)[0]
    screening = hold(
        plan, data, *theta_0, model_sha256=digest, started=folder.started, listeners=listeners if main else ()
    )
    asked = with_screening(data, screening, list(plan.config.safety))
    if main:
        scope = share_scope(digest, data.task)
        warn_of_shares(plan, asked, list(plan.config.prompt_sets), scope)
        close_shares(plan.config, asked, scope)
    return asked, screening


def unaligned_of(plan: ResolvedRun, trust_remote_code: bool) -> str | None:
    """Where the weights before alignment are: as named, or the adapter that `model` is; None where nothing asks."""
    config = plan.config
    if "unaligned" not in plan.needs:
        return None
    if config.unaligned is not None:
        require_merged(config.unaligned, config.model)
        return config.unaligned
    folder = adapter_folder(resolve_model(config.model, config.revision, trust_remote_code))
    if folder is None:
        raise ConfigError(
            f"defense {config.defense.name} needs the weights before alignment, and {config.model} is no adapter",
            remedy="name the model it was aligned from: `unaligned: owner/base`",
        )
    below, below_revision = base_of(folder)
    if adapter_folder(resolve_model(below, below_revision, trust_remote_code)) is not None:
        logger.warning(
            "%s is an adapter on the adapter %s: the last one alone is taken for the alignment; "
            "where it is not, name the weights before alignment (`unaligned`)", folder, below,
        )  # fmt: skip
    return str(folder)


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
