"""Looking at the run: a row per step in `events.jsonl`, a probe after it, the monitor split at every evaluation."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from holdfast.certification.binomial import upper_bound
from holdfast.core.errors import UnsupportedError
from holdfast.core.event_log import EventLog
from holdfast.core.ranks import gather_rows, rank
from holdfast.training.checkpoint_store import step_of
from holdfast.training.hooks import Row
from holdfast.training.loss_spikes import EVENT, SpikeWatch
from holdfast.training.probe import ConstraintProbe, on_whole_set
from holdfast.training.safety import DEFAULT, SafetySet

if TYPE_CHECKING:
    from holdfast.training.run import Run
    from holdfast.training.trainer import SafeTrainer

logger = logging.getLogger(__name__)


def summarise(degradations: Tensor, safety: SafetySet) -> dict[str, float]:
    """Violation rate with its upper bound at 95 %, g and CVaR of measured degradations.

    Where training looks at the examples repeatedly, the bound is a gauge and not a certificate.
    """
    c, n = on_whole_set(safety.constraint, degradations), len(degradations)
    rate = c.violation_rate(degradations)
    return {
        "violation_rate": rate, "violation_upper": upper_bound(round(rate * n), n), "g": float(c.value(degradations)),
        "cvar": c.cvar(degradations), "n": float(n),
    }  # fmt: skip


class StepRecorder(TrainerCallback):
    """Writes the event log and feeds listeners after every optimizer step."""

    def __init__(self, trainer: SafeTrainer) -> None:
        self.trainer = trainer
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        self.spikes, self.spiked = SpikeWatch(), False  # whether the step in progress is discarded as a spike
        self._loss: Tensor | None = None
        self._mean: float | None = None
        self._rate = 0.0
        self._log: EventLog | None = None
        self._probe: ConstraintProbe | None = None
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
        watched = getattr(trainer.args, "spikes", "off") != "off"  # the rule knows the losses of labelled rows
        self.spiked = loss is not None and watched and self.spikes.is_spike(step, loss)
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

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        lr_scheduler: LRScheduler | None = None,
        **_: object,
    ) -> None:
        """Measure theta_0 where that had to wait for sharding, and drop rows of steps that are about to be repeated."""
        self.trainer.measure_reference()
        if rank() == 0 and state.max_steps == 1 and lr_scheduler is not None and not any(lr_scheduler.get_last_lr()):
            logger.warning("the only step is a warm-up step at learning rate 0: nothing is trained (warmup_steps: 0)")
        self._started, self._loss, self._mean = time.monotonic(), None, None
        if rank() == 0:
            self.log_file().truncate_after(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Compose the row of the step just taken."""
        trainer, loss = self.trainer, self.step_loss()
        self._loss = self._mean = None
        row: dict[str, Any] = {
            "step": int(state.global_step), "loss": loss, "learning_rate": self._rate,
            "seconds": round(time.monotonic() - self._started, 3),
            **({"event": EVENT} if self.spiked else trainer.defense.row()),
        }  # fmt: skip
        for name, value in tracked(row).items():
            trainer._metrics["train"][name].append(value)
        if smaller := trainer.run.fitting.figures():
            row["memory"] = smaller
        if trainer.args.probe_rows:
            self._probe = self._probe or ConstraintProbe(trainer.run, trainer.args.probe_rows)
            row["probe"] = self._probe.measure()
        self.write(row)

    def write(self, row: Row) -> None:
        """Add a row to the event log, and tell the listeners."""
        if rank() == 0:
            self.log_file().append(row)
        for listener in self.listeners:
            listener(row)


def tracked(row: Mapping[str, Any]) -> dict[str, float]:
    """A step's numbers by their names in logs and trackers: `safety/<figure>`.

    With several constraints a constraint's own figures are `safety/<constraint>/<figure>`.
    """
    each: Mapping[str, Mapping[str, Any]] = row.get("constraints", {})
    untold = {"step", "loss", "learning_rate", "seconds"}.union(*each.values())  # the first's stand at the top too
    figures = {key: value for key, value in row.items() if key not in untold}
    figures |= {f"{name}/{key}": value for name, one in each.items() for key, value in one.items()}
    return {f"safety/{key}": float(value) for key, value in figures.items() if isinstance(value, int | float)}


def degradations_of(run: Run, name: str, role: str) -> Tensor:
    """`D_i` of every example of the constraint or monitor split, at the current parameters."""
    one, forward = run.data.safety[name], run.forward
    if one.reference is None:
        raise UnsupportedError(
            "evaluation before training under FSDP2: theta_0 is measured once training has sharded the model",
            remedy="call train() first; eval_on_start=True evaluates theta_0",
        )
    examples = one.constraint_set if role == "constraint" else one.monitor_set
    reference = one.constraint_reference if role == "constraint" else one.monitor_reference
    return run.fitting.evaluation(
        forward.batch_size, lambda rows: forward.resized(rows).degradations(examples, reference, one.constraint)
    )


def monitor_metrics(run: Run, prefix: str) -> dict[str, float]:
    """Of the monitor splits: `<prefix>_safety_violation_rate` (of several sets the worst) and its relatives."""
    sets = {name: one for name, one in run.data.safety.items() if one.monitor_set}
    metrics: dict[str, float] = {}
    rates = []
    for name, one in sets.items():
        values = summarise(degradations_of(run, name, "monitor"), one)
        middle = "" if name == DEFAULT else f"{name}_"
        metrics |= {f"{prefix}_safety_{middle}{key}": value for key, value in values.items()}
        rates.append(values["violation_rate"])
    return metrics | ({f"{prefix}_safety_violation_rate": max(rates)} if rates else {})


def quantiles(degradations: Tensor) -> dict[str, float]:
    """Median, upper quantiles and maximum."""
    levels = {"q50": 0.5, "q75": 0.75, "q90": 0.9, "q95": 0.95, "q99": 0.99, "max": 1.0}
    return {name: float(torch.quantile(degradations, level)) for name, level in levels.items()}


def barrier_figures(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Of events.jsonl: how often each event occurred, and where steps were probed, how often and far g was above 0."""
    steps = [row for row in rows if "loss" in row]  # the behaviour monitor has rows of its own
    events = Counter(str(row["event"]) for row in steps if "event" in row)
    probed: dict[str, list[float]] = {}
    for row in steps:
        for name, g in row.get("probe", {}).items():
            probed.setdefault(name, []).append(math.inf if g is None else g)  # null: not finite
    probes = {
        name: {
            "steps": len(g), "above": sum(x > 0.0 for x in g) / len(g),
            "largest": max(g) if math.isfinite(max(g)) else None,
        }
        for name, g in probed.items()
    }  # fmt: skip
    pulled = [row["pulled"] < 1.0 for row in steps if row.get("pulled") is not None]
    shares = {"pulled": sum(pulled) / len(pulled)} if any(pulled) else {}
    return {"events": dict(events)} | shares | ({"probe": probes} if probes else {})
