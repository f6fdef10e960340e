"""The behaviour monitor: greedy replies to monitor prompts during training, sorted and compared with theta_0's.

Every process asks its share of the prompts; the classes are gathered, so all of them hold the same figures. Random
state and module modes are put back: a run with the monitor ends with the weights of a run without it. The figures of a
step are a row of `events.jsonl`, written before the checkpoint of that step, so that a resumed run finds them there
and asks only for what is missing.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback

from holdfast.certification.kept import (
    ANSWERS,
    COVERAGE,
    FIGURES,
    REFUSALS,
    BehaviourValues,
    Kept,
    Limits,
    kept_groups,
    kept_kinds,
)
from holdfast.core.errors import CheckpointError, ConfigError, DataError, UnsupportedError
from holdfast.core.event_log import read
from holdfast.core.hashing import sha256_json
from holdfast.core.ranks import gather_objects, rank, world
from holdfast.data.examples import prompt_text
from holdfast.data.near_duplicates import clusters
from holdfast.data.templates import Template
from holdfast.judging.engines import AUTO, open_engine
from holdfast.judging.prompts import prompt_ids, require_room
from holdfast.judging.reply_classes import ReplyClass, sort_reply
from holdfast.screening.sets import MonitorPrompts
from holdfast.training.checkpoint_store import CheckpointStore, step_of
from holdfast.training.config import is_behaviour_metric
from holdfast.training.snapshot import load_trainable
from holdfast.training.state_files import capture_rng, restore_rng

logger = logging.getLogger(__name__)

Every = Literal["end", "epoch"] | int
NEW_TOKENS = 32  # sort a reply; screening asked theta_0 for as many


class BehaviourMonitor(TrainerCallback):
    """Asks the model in training, at the end and at every `every`; with `train.rollback` before each save too.

    `every`: `end`, `epoch`, or a number of steps; `template`: what becomes of plain prompts.
    """

    def __init__(
        self, trainer: Any, prompts: MonitorPrompts, limits: Limits | None = None, *, every: Every = "end",
        template: Template = "chat",
    ) -> None:  # fmt: skip
        limits = limits or Limits()
        self.trainer, self.every, self._template = trainer, _checked(every), template
        sets = {
            REFUSALS: (prompts.refusals, ReplyClass.REFUSED, limits.refusals),
            ANSWERS: (prompts.answers, ReplyClass.ANSWERED, limits.answers),
            COVERAGE: (prompts.unseen, ReplyClass.REFUSED, limits.coverage),
        }
        self._sets = {
            name: (examples, clusters([prompt_text(e) for e in examples]), wanted, limit)
            for name, (examples, wanted, limit) in sets.items()
        }
        self._asked = list({e.id: e for examples, *_ in sets.values() for e in examples}.values())
        self._require_askable()
        self._identity = sha256_json(
            [[[e.id for e in examples], limit] for examples, _, limit in sets.values()] + [template, NEW_TOKENS]
        )
        self.known: dict[int, dict[str, Kept]] = {}  # the figures of each step that was measured
        self.rolled_back: BehaviourValues = {}  # where a rollback led, if one was called for
        self.seconds = 0.0  # spent asking
        self._held: int | None = None  # the step whose weights were loaded, where it is not the last

    def _require_askable(self) -> None:
        """Refuse what every process would meet, so that none waits for another that has stopped."""
        trainer = self.trainer
        if trainer.is_fsdp_enabled:
            raise UnsupportedError(
                "the behaviour monitor under FSDP: a process cannot reply with a shard of the model",
                remedy="use DDP (accelerate launch without FSDP); `holdfast certify` asks the trained model afterwards",
            )
        if not self._asked:
            raise DataError("the behaviour monitor has no prompts", remedy="give prompts that theta_0 refused")
        ids = prompt_ids(trainer.processing_class, self._asked, self._template)
        require_room(trainer.model, self._asked, ids, NEW_TOKENS)

    @property
    def step(self) -> int:
        """The step after which the model's weights were taken."""
        return int(self.trainer.state.global_step) if self._held is None else self._held

    def measure(self, *, log: bool = True) -> dict[str, Kept]:
        """The figures of the model as it is; measured, stored and told unless this step's are known.

        `log` tells the trainer's log too; an evaluation logs its metrics itself.
        """
        if self.step not in self.known:
            self.known[self.step] = found = self.ask()
            self._tell(found, log=log)
        return self.known[self.step]

    def measure_transformed(self) -> None:
        """Measure a model that was changed after its last step; such a row counts for no checkpoint."""
        self.known[self.step] = found = self.ask()
        self._tell(found, log=True, transformed=True)

    def ask(self) -> dict[str, Kept]:
        """Ask every prompt and count what was kept, of each kind too."""
        began = time.monotonic()
        classes = self._classes()
        self.seconds += time.monotonic() - began
        found = {}
        for name, (examples, groups, wanted, limit) in self._sets.items():
            now = [classes[e.id] for e in examples]
            still = [one == wanted for one in now]
            kinds = kept_kinds([e.category for e in examples], groups, still)
            found[name] = Kept(*kept_groups(groups, still), limit, now.count(ReplyClass.UNSORTED), kinds)
        return found

    def _classes(self) -> dict[str, ReplyClass]:
        """The class of every reply, by the prompt's id; each process asks its share, of few prompts maybe none."""
        trainer, share = self.trainer, self._asked[rank() :: world()]
        found: dict[str, ReplyClass] = {}

        def show() -> None:
            for listener in trainer.recorder.listeners if trainer.is_in_train else ():
                listener({"step": int(trainer.state.global_step), "asked": len(found), "of": len(share)})

        show()
        with self._undisturbed():
            engine = open_engine(AUTO, model=trainer.model, tokenizer=trainer.processing_class, template=self._template)
            for batch in engine.generate(share, max_new_tokens=NEW_TOKENS) if share else ():
                found |= {r.id: sort_reply(r.text, truncated=r.truncated).reply_class for r in batch}
                show()
        return {key: value for part in gather_objects(found) for key, value in part.items()}

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Put random state and module modes back, and reply in the model's own precision, as theta_0 did.

        accelerate replaces the forward of a model trained in mixed precision by one under autocast.
        """
        model = self.trainer.model
        modules = [(module, module.training) for module in model.modules()]
        own, prepared = vars(model).get("_original_forward"), vars(model).get("forward")
        state = capture_rng()
        try:
            if own is not None:
                model.forward = own
            yield
        finally:
            restore_rng(state)
            if own is not None:
                model.forward = prepared
            for module, mode in modules:
                module.training = mode

    def _tell(self, found: Mapping[str, Kept], *, log: bool, transformed: bool = False) -> None:
        """To events.jsonl, the listeners, and what the Trainer reports to."""
        trainer, now = self.trainer, int(self.trainer.state.global_step)
        row: dict[str, Any] = {
            "step": now,
            "behaviour": {name: one.to_json() for name, one in found.items()},
            "prompts_sha256": self._identity,
            **({"of_step": self.step} if self.step != now else {}),
            **({"transformed": True} if transformed else {}),
        }
        trainer.recorder.write(row)
        if not log:
            return
        # As an evaluation logs, without touching what the step in progress has still to log.
        pending, mode = trainer.control.should_log, trainer.model.training
        trainer.model.training = False  # by which TRL tells evaluation from training
        try:
            trainer.log(metrics(found, "eval"))
        finally:
            trainer.model.training, trainer.control.should_log = mode, pending

    def passed(self, step: int) -> bool:
        """Whether a step was measured and no figure failed."""
        return step in self.known and all(one.passed for one in self.known[step].values())

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take over the figures of the steps that a resumed run does not repeat."""
        self._held, self.rolled_back = None, {}
        path = self.trainer.run_dir / "events.jsonl"
        rows = read(path) if rank() == 0 and path.exists() else []
        own = (row for row in rows if row.get("prompts_sha256") == self._identity and not row.get("transformed"))
        known = {
            int(row.get("of_step", row["step"])): {name: Kept.from_json(one) for name, one in row["behaviour"].items()}
            for row in own
        }
        self.known = gather_objects(known)[0]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After every so many steps, after the last one, and before a save that a rollback may return to."""
        last = state.global_step >= state.max_steps
        due = isinstance(self.every, int) and state.global_step % self.every == 0
        if last or due or self._before_save(args, control):
            self.measure()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After every epoch, unless it was broken off."""
        whole = state.global_step >= state.max_steps or not control.should_training_stop
        if (self.every == "epoch" and whole) or self._before_save(args, control):
            self.measure()

    def _before_save(self, args: Any, control: Any) -> bool:
        # A run that was asked to stop does so at once; a resumed one does not save there.
        return bool(getattr(args, "rollback", False) and control.should_save and not control.should_training_stop)

    def conclude(self) -> None:
        """Measure the model that training ended with; with `rollback`, return to the last checkpoint that passed."""
        args, state = self.trainer.args, self.trainer.state
        if args.load_best_model_at_end and state.best_global_step:
            self._held = int(state.best_global_step)
        self.measure()
        if args.rollback and not self.passed(self.step):
            self.roll_back()

    def roll_back(self) -> None:
        """Load the newest checkpoint that passed and verifies; without one the last weights stay."""
        store: CheckpointStore = self.trainer.store
        candidates = reversed(store.checkpoints() if rank() == 0 else [])
        chosen = next((step_of(p) for p in candidates if self.passed(step_of(p)) and _verifies(store, p)), None)
        chosen = gather_objects(chosen)[0]
        self.rolled_back = {"rolled_back_to": chosen}
        if chosen is None:
            logger.warning("rollback: no checkpoint kept its behaviour; the weights of the last step stay")
            return
        load_trainable(self.trainer.model, store.root / f"checkpoint-{chosen}")
        self._held = chosen
        logger.warning("rolled back to step %d, the last whose behaviour was not over its limits", chosen)

    def result(self) -> BehaviourValues:
        """What result.json says: the figures of the model as it is, and where a rollback led if one was called for."""
        figures = {name: one.to_json() for name, one in self.measure().items()}
        return {"behaviour": figures, **self.rolled_back}

    def protected(self) -> list[Path]:
        """The checkpoint that a rollback would return to, which rotation must leave."""
        return [p for p in self.trainer.store.checkpoints() if self.passed(step_of(p))][-1:]


def require_monitor(args: Any, monitor: BehaviourMonitor | None) -> None:
    """Refuse settings that read figures which nobody measures."""
    metric = str(args.metric_for_best_model)
    read = is_behaviour_metric(metric)
    if monitor is None and (args.rollback or read):
        what = "rollback" if args.rollback else f"metric_for_best_model={metric!r}"
        raise ConfigError(
            f"{what} reads the behaviour monitor, and this run has none",
            remedy="use `safety: auto`; in Python call trainer.watch_behaviour(...) before train()",
        )
    if read and metric.removeprefix("eval_").removeprefix("behaviour_") not in FIGURES:
        raise ConfigError(
            f"metric_for_best_model is {metric!r}, which the behaviour monitor does not measure",
            remedy=f"use one of {', '.join(f'behaviour_{name}' for name in FIGURES)}",
        )


def _verifies(store: CheckpointStore, path: Path) -> bool:
    try:
        store.verify(path)
    except CheckpointError as error:
        logger.warning("rollback passes over a damaged checkpoint: %s", error.what)
        return False
    return True


def metrics(figures: Mapping[str, Kept], prefix: str) -> dict[str, float]:
    """Kept shares as an evaluation reports them: `<prefix>_behaviour_refusals_kept` and its relatives."""
    return {f"{prefix}_behaviour_{name}": one.share for name, one in figures.items() if one.share is not None}


def _checked(every: Any) -> Every:
    if every in ("end", "epoch") or (isinstance(every, int) and not isinstance(every, bool) and every >= 1):
        return every  # type: ignore[no-any-return]
    raise ConfigError(
        f"every is {every!r}, expected end, epoch or a number of steps",
        remedy="give every='end', every='epoch' or every=100 (`monitor: {every: ...}` in a run file)",
    )
