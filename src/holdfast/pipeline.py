"""A run from top to bottom: settings, folder, data, model, constrained training, measurement, result."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.auditing.run_audit import MeasuredRole, write_run_audit
from holdfast.config import RunConfig, config_sha256, resolved
from holdfast.config.build import (
    behaviour_limits,
    constraints,
    data_arguments,
    defense,
    model_options,
    peft_config,
    screening_settings,
    training_arguments,
    watches,
)
from holdfast.core.adapter_card import CARD_MARKER, loading_note
from holdfast.core.errors import ConfigError
from holdfast.core.files import write_text
from holdfast.core.hashing import sha256_json
from holdfast.core.provenance import commit, hardware, versions
from holdfast.core.ranks import gather_objects
from holdfast.data.encode import template_sha256, tokenizer_sha256
from holdfast.data.templates import use_template
from holdfast.models.adapter import adapter_folder, base_of
from holdfast.models.alignment_shift import require_merged
from holdfast.models.content import ModelContent, content_of
from holdfast.models.continued import load_adapter_pair
from holdfast.models.handle import load_pair, resolve
from holdfast.screening.screen import Screening
from holdfast.shares import close_shares, warn_about_data, warn_of_shares
from holdfast.stages.finetune import Listener, RoleLosses, build_trainer, measure, summary, train
from holdfast.stages.hold import Asking, hold, share_scope, with_screening
from holdfast.stages.interruption import Interruption
from holdfast.stages.prepare import Prepared, prepare, row_counts
from holdfast.stages.run_folder import RunFolder
from holdfast.stages.saving import disk_errors, whole_folder
from holdfast.trainers.run_lock import RunLock
from holdfast.trainers.trainer import SafeSFTTrainer

logger = logging.getLogger(__name__)

Measured = Mapping[str, Mapping[str, RoleLosses]]
"""Safety set -> role -> losses."""


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
    config: RunConfig,
    *,
    resume: bool = False,
    listeners: Sequence[Listener] = (),
    trust_remote_code: bool = False,
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
    limits, arguments, values = constraints(config), training_arguments(config), resolved(config)
    chosen = defense(config)
    for limit in limits.values() if chosen.constrains else ():
        limit.require_feasible_start()
    folder = RunFolder(Path(config.output_dir))
    main = arguments.process_index == 0

    with ExitStack() as stack:
        if main:
            stack.enter_context(_held(folder))
        interruption = stack.enter_context(Interruption())
        folder.require_free(values, resume=resume)
        if (finished := folder.finished()) is not None:
            return RunResult(folder.path, finished)
        data = read_data(config)
        if main:
            warn_about_data(config, data)
        model, tokenizer, adapter = load_start(config, trust_remote_code)
        if main:
            # Now, not at the end: a folder may change while training runs.
            before = content_of(config.model, revision=config.revision, trust_remote_code=trust_remote_code)
            folder.write_config(values)
        data, screening = ask_theta_0(
            config, data, (model, tokenizer), before.sha256 if main else "", arguments, listeners
        )
        trainer = build_trainer(
            model=model,
            tokenizer=tokenizer,
            data=data,
            constraints=limits,
            defense=chosen,
            arguments=arguments,
            peft_config=adapter,
            unaligned=unaligned_of(config, trust_remote_code),
            callbacks=[interruption],
            listeners=listeners if main else (),
        )
        watch(config, trainer, screening)
        trained = train(trainer, resume=_resumes(folder, asked=resume))
        if interruption.requested:
            raise KeyboardInterrupt
        _save(trainer, folder.model if config.lora is None else folder.adapter, folder)
        found = {"steps": trained.steps, "seconds": round(trained.seconds, 3), "data": row_counts(data)}
        found |= {"trust_remote_code": trust_remote_code}
        found |= {} if screening is None else {"screening": screening.figures()}
        result = measured_result(config, trainer, before if main else None, found)
    return RunResult(folder.path, result)


def measured_result(
    config: RunConfig, trainer: SafeSFTTrainer, before: ModelContent | None, found: dict[str, Any]
) -> dict[str, Any]:
    """Measure the trained model; the first process writes the audits and result.json.

    Args:
        before: theta_0's content; None on the other processes.
        found: what is known without measuring.
    """
    folder, started = RunFolder(Path(config.output_dir)), time.monotonic()
    measured = measure(trainer)
    result = {"safety": summary(trainer, measured), **found, **_about(config, trainer)}
    if before is None:
        return result
    with disk_errors(f"the audit in {folder.path}", folder.checkpoints):
        explain_loading(folder)
        seconds = time.monotonic() - started
        trusted = found["trust_remote_code"]
        result["audit_sha256"] = write_audits(
            config, trainer, measured, before, seconds=seconds, trust_remote_code=trusted
        )
        return folder.write_result(result)


def _resumes(folder: RunFolder, *, asked: bool) -> bool:
    """Whether training goes on from a checkpoint."""
    if asked and not folder.has_checkpoints():
        logger.warning("nothing to resume in %s: the run starts anew", folder.path)
    return asked and folder.has_checkpoints()


def _save(trainer: SafeSFTTrainer, final: Path, folder: RunFolder) -> None:
    """Write the adapter or model, whole or not at all."""
    with disk_errors(str(final), folder.checkpoints), whole_folder(final) as staged:
        trainer.save_model(str(staged))


@contextmanager
def _held(folder: RunFolder) -> Iterator[None]:
    """The run's lock, taken before anything is made and held until what a refused run made is removed."""
    with RunLock(folder.path) as lock, folder.kept_if_started(made=lock.made):
        yield


def _about(config: RunConfig, trainer: SafeSFTTrainer) -> dict[str, Any]:
    """What a run was: behaviour kept, its defense, how its steps were computed, settings, versions, commit, machine."""
    return {
        **trainer.behaviour_result(),
        "defense": {"name": trainer.defense.name, "constrains": trainer.defense.constrains},
        "step": trainer.step_path,
        "step_declined": trainer.step_declined,
        "memory": trainer.fitting.figures(),
        "spikes": {"discarded": trainer.recorder.spikes.total, "last_steps": trainer.recorder.spikes.steps},
        "config_sha256": config_sha256(config),
        "versions": versions(),
        "commit": commit(),
        "hardware": hardware(),
    }


def ask_theta_0(
    config: RunConfig,
    data: Prepared,
    theta_0: tuple[Any, Any],
    model_sha256: str,
    arguments: Any,
    listeners: Sequence[Listener],
) -> tuple[Prepared, Screening | None]:
    """The run's data after asking its model, and the screening; as they were where nothing is asked.

    Args:
        theta_0: the model and its tokenizer.
        model_sha256: of the first process; the others need not hash the model.
    """
    main = arguments.process_index == 0
    if not watches(config):
        if main:
            close_shares(config, data)
        return data, None
    folder = RunFolder(Path(config.output_dir))
    digest = gather_objects(model_sha256)[0]
    screening = hold(
        asking(config), data, *theta_0, model_sha256=digest, run=folder.path, arguments=arguments,
        started=folder.started, listeners=listeners if main else (),
    )  # fmt: skip
    asked = with_screening(data, screening, list(config.safety))
    if main:
        scope = share_scope(digest, data.task)
        warn_of_shares(config, asked, list(config.prompt_sets), scope)
        close_shares(config, asked, scope)
    return asked, screening


def watch(config: RunConfig, trainer: SafeSFTTrainer, screening: Screening | None) -> None:
    """Have the trainer watch the model's behaviour, where there are prompts for it."""
    if screening is not None and screening.monitor.any:
        trainer.watch_behaviour(
            screening.monitor, behaviour_limits(config), every=config.monitor.every, template=config.template
        )


def asking(config: RunConfig) -> Asking:
    """How a run asks its model before training."""
    screening = config.screening
    return Asking(screening_settings(config), config.template, screening.engine, screening.engine_options)


def load_start(config: RunConfig, trust_remote_code: bool) -> tuple[Any, Any, Any]:
    """theta_0, its tokenizer with the run's template, and the adapter to put on it (None: nothing new is put on)."""
    options, wanted = model_options(config, trust_remote_code), peft_config(config)
    if config.adapter_policy == "merge":
        model, tokenizer = load_pair(config.model, **options)
    else:
        model, tokenizer = load_adapter_pair(config.model, wanted, **options)
        wanted = None
    use_template(tokenizer, config.template)
    return model, tokenizer, wanted


def unaligned_of(config: RunConfig, trust_remote_code: bool) -> str | None:
    """Where the weights before alignment are: as named, or the adapter that `model` is; None where nothing asks.

    Raises:
        ConfigError: the defense asks, none is named, and the model is no adapter; or the adapter named is not in it.
    """
    if "unaligned" not in defense(config).needed(config.stage):
        return None
    if config.unaligned is not None:
        require_merged(config.unaligned, config.model)
        return config.unaligned
    folder = adapter_folder(resolve(config.model, config.revision, trust_remote_code))
    if folder is None:
        raise ConfigError(
            f"defense {config.defense.name} needs the weights before alignment, and {config.model} is no adapter",
            remedy="name the model it was aligned from: `unaligned: owner/base`",
        )
    below, below_revision = base_of(folder)
    if adapter_folder(resolve(below, below_revision, trust_remote_code)) is not None:
        logger.warning(
            "%s is an adapter on the adapter %s: the last one alone is taken for the alignment; "
            "where it is not, name the weights before alignment (`unaligned`)", folder, below,
        )  # fmt: skip
    return str(folder)


def explain_loading(folder: RunFolder) -> None:
    """Say beside an adapter on top of an adapter how it is loaded; the card that PEFT wrote names the wrong base."""
    note = loading_note(folder.adapter)
    if note is not None:
        write_text(folder.adapter / "README.md", f"{CARD_MARKER}\n\n# Adapter\n\n{note}\n")
        logger.warning(
            "%s stands on another adapter: its README.md says how to load it outside holdfast", folder.adapter
        )


def write_audits(
    config: RunConfig,
    trainer: Any,
    measured: Measured,
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
    for name, one in trainer.safety.items():
        block, record = config.safety[name], one.split.record
        categories = {example.id: example.category for role in one.split.roles.values() for example in role}
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
        made = write_run_audit(
            one.folder(folder.path),
            roles,
            one.constraint,
            before={"ref": config.model, "sha256": before.sha256},
            after={"ref": after.ref, "sha256": after.sha256},
            data={"source": block.source, "sha256": sha256_json([record.sha256[role] for role in roles])},
            tokenizer_sha256=tokenizer_sha256(trainer.processing_class),
            template_sha256=template_sha256(trainer.processing_class),
            dtype=str(trainer.model.dtype).removeprefix("torch."),
            device=trainer.args.device.type,
            noise_floor=one.noise_floor,
            duplicates_dropped=record.duplicates_dropped,
            seconds=seconds,
        )
        written[name] = made.sha256
    return written


def read_data(config: RunConfig) -> Prepared:
    """Read the task and safety data of a run and split the latter."""
    return prepare(**data_arguments(config))
