"""Looking at the run: one row per step in `events.jsonl`, and the monitor split at every evaluation."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from holdfast.certification.binomial import upper_bound
from holdfast.constraint.passes import Forward
from holdfast.core.errors import UnsupportedError
from holdfast.core.event_log import EventLog
from holdfast.core.ranks import gather_rows, rank
from holdfast.trainers.checkpoint_store import step_of
from holdfast.trainers.fitting import Fitting
from holdfast.trainers.loss_spikes import EVENT, SpikeWatch
from holdfast.trainers.safety import DEFAULT, SafetySet

logger = logging.getLogger(__name__)


def summarise(degradations: Tensor, safety: SafetySet) -> dict[str, float]:
    """Violation rate with its upper bound at 95 %, g and CVaR of measured degradations.

    Where training looks at the examples repeatedly, the bound is a gauge and not a certificate.
    """
    c, n = safety.constraint, len(degradations)
    if c.majorizer == "cvar":  # its threshold adapts; on a whole set the best one is that set's own quantile
        c = c.with_threshold(float(torch.quantile(degradations, 1.0 - c.alpha)))
    rate = c.violation_rate(degradations)
    return {
        "violation_rate": rate,
        "violation_upper": upper_bound(round(rate * n), n),
        "g": float(c.value(degradations)),
        "cvar": c.cvar(degradations),
        "n": float(n),
    }


class StepRecorder(TrainerCallback):
    """Writes the event log and feeds listeners after every optimizer step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        self.spikes = SpikeWatch()
        self.spiked = False
        """Whether the step in progress is discarded as a spike."""
        self._loss: Tensor | None = None
        self._mean: float | None = None
        self._rate = 0.0
        self._log: EventLog | None = None
        self._started = time.monotonic()

    def add_loss(self, loss: Tensor, rate: float) -> None:
        """Add a micro-batch's loss to this step's; note the learning rate (the scheduler moves on before the row)."""
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        self._rate = rate

    def step_loss(self) -> float | None:
        """The loss of the whole step once its micro-batches are through; None where there was none.

        The Trainer scales each rank's loss so that the mean over ranks is the loss of the whole batch.
        """
        if self._mean is None and self._loss is not None:
            self._mean = float(gather_rows(self._loss.reshape(1)).mean())
        return self._mean

    def spikes_now(self) -> bool:
        """Whether the step whose gradient is complete is to be discarded; ends the run where spikes do not pass."""
        trainer, loss = self.trainer, self.step_loss()
        step = int(trainer.state.global_step) + 1
        self.spiked = loss is not None and trainer.args.spikes != "off" and self.spikes.is_spike(step, loss)
        if not self.spiked:
            return False
        if rank() == 0:
            logger.warning(
                "step %d is discarded: its loss %.3g is a spike (at most %.3g is ordinary)",
                step, loss, self.spikes.limit(),
            )  # fmt: skip
        # A checkpoint taken after the step before the first spike holds the very weights that it was measured at.
        older = [path for path in trainer.store.checkpoints() if step_of(path) < self.spikes.recent[0] - 1]
        self.spikes.require_passing(str(older[-1]) if older else None)
        return True

    def log_file(self) -> EventLog:
        """The run's event log, opened on first use."""
        if self._log is None:
            self._log = EventLog(self.trainer.run_dir / "events.jsonl")
        return self._log

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure theta_0 where that had to wait for sharding, and drop rows of steps that are about to be repeated."""
        self.trainer._measure_reference()
        self._started, self._loss, self._mean = time.monotonic(), None, None
        if rank() == 0:
            self.log_file().truncate_after(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compose the row of the step just taken."""
        trainer, loss = self.trainer, self.step_loss()
        self._loss = self._mean = None
        row: dict[str, Any] = {
            "step": int(state.global_step),
            "loss": loss,
            "learning_rate": self._rate,
            "seconds": round(time.monotonic() - self._started, 3),
            **({"event": EVENT} if self.spiked else trainer.defense.row()),
        }
        for key, value in row.items():
            if key not in ("step", "loss", "learning_rate", "seconds") and isinstance(value, int | float):
                trainer._metrics["train"][f"safety/{key}"].append(float(value))
        if smaller := trainer.fitting.figures():
            row["memory"] = smaller
        if rank() == 0:
            self.log_file().append(row)
        for listener in self.listeners:
            listener(row)


class MonitorMixin:
    """Adds `eval_safety_violation_rate` and its relatives to every evaluation."""

    # Provided by the trainer this is mixed into.
    args: Any
    state: Any
    control: Any
    model: Any
    safety: dict[str, SafetySet]
    recorder: StepRecorder
    fitting: Fitting
    callback_handler: Any

    @property
    def step_listeners(self) -> list[Callable[[dict[str, Any]], None]]:
        """Called with each row of the event log."""
        return self.recorder.listeners

    @contextmanager
    def _evaluation_without_task_set(self, args: Any, eval_dataset: Any, has_safety: bool) -> Iterator[None]:
        """The Trainer demands an evaluation set for `eval_strategy`; the monitor split is one."""
        strategy = args.eval_strategy
        self._safety_only_evaluation = eval_dataset is None and has_safety
        if self._safety_only_evaluation:
            args.eval_strategy = "no"
        try:
            yield
        finally:
            args.eval_strategy = strategy

    def degradations(self, name: str = DEFAULT, role: str = "monitor") -> Tensor:
        """`D_i` of every example of the constraint or monitor split, at the current parameters."""
        one = self.safety[name]
        if one.reference is None:
            raise UnsupportedError(
                "evaluation before training under FSDP2: theta_0 is measured once training has sharded the model",
                remedy="call train() first; eval_on_start=True evaluates theta_0",
            )
        examples = one.constraint_set if role == "constraint" else one.monitor_set
        reference = one.constraint_reference if role == "constraint" else one.monitor_reference
        forward: Forward = self.forward_of(self.model)  # type: ignore[attr-defined]
        return self.fitting.evaluation(
            forward.batch_size, lambda rows: forward.resized(rows).degradations(examples, reference, one.constraint)
        )

    def safety_metrics(self, prefix: str = "eval") -> dict[str, float]:
        """The monitor split now; `<prefix>_safety_violation_rate` is the worst over several sets."""
        found: dict[str, dict[str, float]] = {}
        for name, one in self.safety.items():
            if one.monitor_set:
                found[name] = summarise(self.degradations(name), one)
        metrics: dict[str, float] = {}
        for name, values in found.items():
            middle = "" if name == DEFAULT else f"{name}_"
            metrics.update({f"{prefix}_safety_{middle}{key}": value for key, value in values.items()})
        if found:
            metrics[f"{prefix}_safety_violation_rate"] = max(v["violation_rate"] for v in found.values())
        return metrics

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As the Trainer's; what `trainer_state.json` keeps has null for a non-finite number, as JSON demands."""
        super().log(logs, *args, **kwargs)  # type: ignore[misc]
        kept = self.state.log_history[-1]
        kept.update({k: None for k, v in kept.items() if isinstance(v, float) and not math.isfinite(v)})

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """The task's evaluation, with the monitor split's figures in its metrics (early stopping reads them there)."""
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)  # type: ignore[misc]
        # With several evaluation sets the prefix is eval_<set>; the monitor split does not depend on the set.
        output.metrics.update(self.safety_metrics(metric_key_prefix.split("_", maxsplit=1)[0]))
        return output

    def evaluate(
        self, eval_dataset: Any = None, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> dict[str, float]:
        """As the Trainer's, leaving the random state alone; without a task evaluation set, the monitor split alone."""
        if eval_dataset is not None or not self._safety_only_evaluation:
            devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
            # A data loader draws its seed from the global state, which would change the dropout masks that follow.
            with torch.random.fork_rng(devices=devices):
                found: dict[str, float] = super().evaluate(  # type: ignore[misc]
                    eval_dataset, *args, metric_key_prefix=metric_key_prefix, **kwargs
                )
            return found
        self.model.eval()  # TRL's log() tells evaluation from training by this flag; training_step sets it again
        metrics = self.safety_metrics(metric_key_prefix)
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def quantiles(degradations: Tensor) -> dict[str, float]:
    """Median, upper quantiles and maximum."""
    levels = {"q50": 0.5, "q75": 0.75, "q90": 0.9, "q95": 0.95, "q99": 0.99, "max": 1.0}
    return {name: float(torch.quantile(degradations, level)) for name, level in levels.items()}
