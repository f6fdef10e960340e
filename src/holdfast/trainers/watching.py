"""What a trainer does with its behaviour monitor: metrics, the figures a run ends with, and the way back.

With `rollback` a run whose last figures fail ends with the weights of the newest checkpoint whose own did not. Only
monitor prompts are read for that choice.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from holdfast.certification.kept import FIGURES, Limits
from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.core.ranks import gather_objects, rank
from holdfast.data.templates import Template
from holdfast.screening.monitor_prompts import MonitorPrompts
from holdfast.trainers.behaviour import BehaviourMonitor, Every, metrics
from holdfast.trainers.checkpoint_store import CheckpointStore, step_of
from holdfast.trainers.config import is_behaviour_metric
from holdfast.trainers.hooks import Defense
from holdfast.trainers.snapshot import load_trainable

logger = logging.getLogger(__name__)


class BehaviourMixin:
    """Adds `watch_behaviour`; without that call a trainer is as it was."""

    # Provided by the trainer this is mixed into.
    args: Any
    state: Any
    model: Any
    store: CheckpointStore
    defense: Defense
    is_in_train: bool

    behaviour_monitor: BehaviourMonitor | None = None

    def watch_behaviour(
        self,
        prompts: MonitorPrompts,
        limits: Limits | None = None,
        *,
        every: Every = "end",
        template: Template = "chat",
    ) -> BehaviourMonitor:
        """Watch the model's replies from now on; to be called before `train`. See `BehaviourMonitor`."""
        if self.behaviour_monitor is not None:
            self.remove_callback(self.behaviour_monitor)  # type: ignore[attr-defined]
        self.behaviour_monitor = BehaviourMonitor(self, prompts, limits, every=every, template=template)
        self.add_callback(self.behaviour_monitor)  # type: ignore[attr-defined]
        return self.behaviour_monitor

    def behaviour_result(self) -> dict[str, Any]:
        """What result.json says about behaviour: nothing where it was not watched.

        `behaviour` holds the figures of the model as it is. `rolled_back_to` is there where a rollback was called for:
        the step that the weights are of, or None where no checkpoint passed.
        """
        if self.behaviour_monitor is None:
            return {}
        found = self.behaviour_monitor.measure()
        return {"behaviour": {name: one.to_json() for name, one in found.items()}, **self._rolled_back}

    _rolled_back: dict[str, int | None] = {}  # noqa: RUF012  (replaced, never changed)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; at its end behaviour is measured, and the model goes back where that is asked for."""
        self._require_monitor()
        self._rolled_back = {}
        found = super().train(*args, **kwargs)  # type: ignore[misc]
        monitor = self.behaviour_monitor
        if monitor is not None and self._finished():  # type: ignore[attr-defined]
            if self.args.load_best_model_at_end and self.state.best_global_step:
                monitor.hold(int(self.state.best_global_step))
            monitor.measure()
            if self.args.rollback and not monitor.passed(monitor.step):
                self._roll_back(monitor)
        return found

    def measure_transformed(self) -> None:
        """Measure again where the defense changed the model after its last step."""
        changes = type(self.defense).transform is not Defense.transform
        if changes and self.behaviour_monitor is not None and self._finished():  # type: ignore[attr-defined]
            self.behaviour_monitor.measure_transformed()

    def safety_metrics(self, prefix: str = "eval") -> dict[str, float]:
        """The monitor split's figures, and the kept shares where they are known, or asked for by name."""
        found: dict[str, float] = super().safety_metrics(prefix)  # type: ignore[misc]
        monitor = self.behaviour_monitor
        if monitor is None:
            return found
        if monitor.step in monitor.known or (self.is_in_train and is_behaviour_metric(self.args.metric_for_best_model)):
            return {**found, **metrics(monitor.measure(log=False), prefix)}
        return found if self.is_in_train else {**found, **metrics(monitor.ask(), prefix)}

    def protected_checkpoints(self) -> set[Path]:
        """Checkpoints that rotation must leave: also the one that a rollback would return to."""
        found: set[Path] = super().protected_checkpoints()  # type: ignore[misc]
        monitor = self.behaviour_monitor
        passed = [p for p in self.store.checkpoints() if monitor is not None and monitor.passed(step_of(p))]
        return found | set(passed[-1:] if self.args.rollback else ())

    def _require_monitor(self) -> None:
        """Refuse settings that read figures which nobody measures."""
        monitor, metric = self.behaviour_monitor, str(self.args.metric_for_best_model)
        asked = {"rollback": self.args.rollback, f"metric_for_best_model={metric!r}": is_behaviour_metric(metric)}
        for what in (what for what, given in asked.items() if given and monitor is None):
            raise ConfigError(
                f"{what} reads the behaviour monitor, and this run has none",
                remedy="use `safety: auto`; in Python call trainer.watch_behaviour(...) before train()",
            )
        name = metric.removeprefix("eval_").removeprefix("behaviour_")
        if is_behaviour_metric(metric) and name not in FIGURES:
            raise ConfigError(
                f"metric_for_best_model is {metric!r}, which the behaviour monitor does not measure",
                remedy=f"use one of {', '.join(f'behaviour_{name}' for name in FIGURES)}",
            )

    def _roll_back(self, monitor: BehaviourMonitor) -> None:
        """Load the newest checkpoint that passed and verifies; without one the last weights stay."""
        chosen: int | None = None
        for path in reversed(self.store.checkpoints() if rank() == 0 else []):
            if monitor.passed(step_of(path)) and _verifies(self.store, path):
                chosen = step_of(path)
                break
        chosen = gather_objects(chosen)[0]
        self._rolled_back = {"rolled_back_to": chosen}
        if chosen is None:
            logger.warning("rollback: no checkpoint kept its behaviour; the weights of the last step stay")
            return
        load_trainable(self.model, self.store.root / f"checkpoint-{chosen}")
        monitor.hold(chosen)
        logger.warning("rolled back to step %d, the last whose behaviour was within its limits", chosen)


def _verifies(store: CheckpointStore, path: Path) -> bool:
    try:
        store.verify(path)
    except CheckpointError as error:
        logger.warning("rollback passes over a damaged checkpoint: %s", error.what)
        return False
    return True
