"""A run from top to bottom: settings, folder, data, model, constrained training, measurement, result."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.constraint.feasibility import require_feasible_start
from holdfast.core.file_lock import RunLock
from holdfast.core.library_types import LanguageModel, Tokenizer
from holdfast.core.ranks import gather_objects
from holdfast.models.content import ModelContent, content_of
from holdfast.records.result_values import ResultValues
from holdfast.runs.config import RunConfig
from holdfast.runs.config.resolve import ResolvedRun, data_arguments, resolve
from holdfast.runs.stages.certifiable import close_shares, warn_about_data, warn_of_shares
from holdfast.runs.stages.cost import Clock
from holdfast.runs.stages.finetune import Interruption, Listener, build_trainer, load_start, train, unaligned_of, watch
from holdfast.runs.stages.prepare import Prepared, hold, prepare, row_counts, share_scope
from holdfast.runs.stages.result import Known, measured_result
from holdfast.runs.stages.run_folder import RunFolder, disk_errors, whole_folder
from holdfast.screening.screen import Screening

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """What a finished run leaves: its folder, and the content of its result.json."""

    folder: Path
    values: ResultValues

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
    plan, clock = resolve(config), Clock()
    for limit in plan.constraints.values() if plan.defense.constrains else ():
        require_feasible_start(limit, getattr(plan.defense.config, "reserve", 0.0))
    folder, main = RunFolder(plan.folder), plan.arguments.process_index == 0
    with ExitStack() as stack:
        if main:  # the lock is taken before anything is made, and held until what a refused run made is removed
            lock = stack.enter_context(RunLock(folder.path))
            stack.enter_context(folder.kept_if_started(made=lock.made))
        interruption = stack.enter_context(Interruption())
        folder.require_free(plan.values, resume=resume)
        if (finished := folder.finished()) is not None:
            return RunResult(folder.path, finished)
        goes_on = resume and folder.has_checkpoints()
        if resume and not goes_on:
            logger.warning("nothing to resume in %s: the run starts anew, with the replies that it has", folder.path)
        data = read_data(config)
        if main:
            warn_about_data(plan, data)
        model, tokenizer, adapter = load_start(config, trust_remote_code)
        before = None
        if main:
            folder.announce_rows(data.task, tokenizer)
            # Now, not at the end: a folder may change while training runs.
            before = content_of(config.model, revision=config.revision, trust_remote_code=trust_remote_code)
            folder.write_config(plan.values)
        clock.ends("loading")
        data, screening = ask_theta_0(plan, data, (model, tokenizer), before, listeners)
        clock.ends("preparing" if screening is None else "asking")
        trainer = build_trainer(
            model=model, tokenizer=tokenizer, data=data, constraints=plan.constraints, defense=plan.defense,
            arguments=plan.arguments, peft_config=adapter, unaligned=unaligned_of(plan, trust_remote_code),
            callbacks=[interruption], listeners=listeners if main else (), rows=stack.enter_context(folder.task_rows()),
        )  # fmt: skip
        watch(trainer, plan, screening)
        clock.ends("preparing")
        steps, seconds = train(trainer, resume=goes_on)
        clock.ends("training")
        if interruption.requested:
            raise KeyboardInterrupt
        final = folder.model if config.lora is None else folder.adapter
        with disk_errors(str(final), folder.checkpoints), whole_folder(final) as staged:
            trainer.save_model(str(staged))
        figures = None if screening is None else screening.figures()
        known = Known(steps, round(seconds, 3), trust_remote_code, row_counts(data), figures)
        return RunResult(folder.path, measured_result(plan, trainer, before, known, clock))


def read_data(config: RunConfig) -> Prepared:
    """Read the task and safety data of a run and split the latter."""
    return prepare(**data_arguments(config))


def ask_theta_0(
    plan: ResolvedRun, data: Prepared, theta_0: tuple[LanguageModel, Tokenizer],
    before: ModelContent | None, listeners: Sequence[Listener],
) -> tuple[Prepared, Screening | None]:  # fmt: skip
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
    every = {**data.safety, **screening.sets}  # in the order of the run file
    asked = replace(data, task=screening.kept(data.task), safety={name: every[name] for name in plan.config.safety})
    if main:
        scope = share_scope(digest, data.task)
        warn_of_shares(plan, asked, list(plan.config.prompt_sets), scope)
        close_shares(plan.config, asked, scope)
    return asked, screening
