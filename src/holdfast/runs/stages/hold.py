"""The asking stage of a run: theta_0 is asked before training, conflicts leave the task, its replies are held."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from holdfast.certification.public_prompts import scope_of
from holdfast.core.errors import UnsupportedError
from holdfast.data.examples import Example
from holdfast.runs.config.resolve import ResolvedRun
from holdfast.runs.stages.prepare import Prepared
from holdfast.screening.asking import asker_of, plan_asking
from holdfast.screening.record import FOLDER, content_sha256, fixed_screening
from holdfast.screening.screen import Screening
from holdfast.screening.screened import ask_and_screen, belongs_to

logger = logging.getLogger(__name__)


def hold(
    plan: ResolvedRun,
    data: Prepared,
    model: Any,
    tokenizer: Any,
    *,
    model_sha256: str,
    started: bool,
    listeners: Sequence[Callable[[dict[str, Any]], None]] = (),
) -> Screening:
    """The screening of a run that asks: made before its first step, read from the run folder afterwards.

    `model` is theta_0, loaded and without a new adapter; `data` has the task, and the safety sets that the user wrote.
    """
    run, arguments, settings, template = plan.folder, plan.arguments, plan.screening, plan.config.template
    assert settings is not None  # asked of runs that ask
    if arguments.distributed_state.distributed_type in ("FSDP", "DEEPSPEED"):
        raise UnsupportedError(
            "asking the model under FSDP or DeepSpeed: a sharded model cannot be asked",
            remedy="screen on one device first (holdfast screen); train on its kept rows with `safety: {data: FILE}`",
        )

    def tell(what: str, done: int, total: int) -> None:
        for listener in listeners:
            listener({"stage": "ask", "what": what, "done": done, "total": total})

    def make() -> Screening:
        if getattr(model, "hf_device_map", None) is None:
            model.to(arguments.device)
        asker = asker_of(
            model, tokenizer, model_sha256=model_sha256, template=template, engine=plan.config.screening.engine,
            options=plan.config.screening.engine_options, told=tell,
        )  # fmt: skip
        logger.info("asking the model: %s", plan_asking(data.task, settings).sentence())
        listed = run.with_name(f"{run.name}-conflicts.jsonl")
        return ask_and_screen(
            model, data.task, asker, settings, template=template, pairs=data.safety.values(), listed=listed
        )

    bound = belongs_to(model_sha256, data.task, settings, template)
    return fixed_screening(run / FOLDER, bound, make, started=started)


def share_scope(model_sha256: str, task: Sequence[Example]) -> str:
    """Within what the openings of bundled certify prompts are counted: this model before, and this task."""
    return scope_of(model_sha256, content_sha256(task))


def with_screening(data: Prepared, screening: Screening, names: Sequence[str]) -> Prepared:
    """The run's data after asking: the kept rows, and every safety set in the order of the run file."""
    every = {**data.safety, **screening.sets}
    return replace(data, task=screening.kept(data.task), safety={name: every[name] for name in names})
