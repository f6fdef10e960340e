"""The fine-tuning stage: model, data, constraint and defense in, trained model and its measurements out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from holdfast.constraint.chance import ChanceConstraint
from holdfast.data.examples import to_rows
from holdfast.stages.prepare import Prepared
from holdfast.trainers.monitoring import summarise
from holdfast.trainers.trainer import SafeSFTTrainer

logger = logging.getLogger(__name__)

Listener = Callable[[dict[str, Any]], None]
"""Receives a row a step, as in events.jsonl, and before the first `{"stage": "train", "total_steps": n}`."""


class AnnounceSteps(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """Tells listeners how many steps there will be, which only the trainer knows."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = listeners

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Announce the number of steps and the step that a resumed run starts from."""
        for listener in self._listeners:
            listener({"stage": "train", "total_steps": state.max_steps, "step": state.global_step})


def build_trainer(
    *,
    model: Any,
    tokenizer: Any,
    data: Prepared,
    constraints: Mapping[str, ChanceConstraint],
    defense: Any,
    arguments: Any,
    peft_config: Any,
    callbacks: Sequence[Any] = (),
    listeners: Sequence[Listener] = (),
) -> SafeSFTTrainer:
    """The trainer of one run.

    Args:
        listeners: see `Listener`; where there are any, they replace the trainer's own progress output.
    """
    trainer = SafeSFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(to_rows(data.task)),
        processing_class=tokenizer,
        peft_config=peft_config,
        safety_dataset=data.safety,
        constraint=dict(constraints),
        defense=defense,
        callbacks=[*callbacks, AnnounceSteps(listeners)],
    )
    if listeners:
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        trainer.step_listeners.extend(listeners)
    return trainer


@dataclass(frozen=True)
class Trained:
    """How long training took: optimizer steps in all, and seconds of this process."""

    steps: int
    seconds: float


def train(trainer: SafeSFTTrainer, *, resume: bool) -> Trained:
    """Train to the end, from the start or from the newest checkpoint that verifies."""
    start = time.monotonic()
    trainer.train(resume_from_checkpoint=True if resume else None)
    return Trained(steps=trainer.state.global_step, seconds=time.monotonic() - start)


def measure(trainer: SafeSFTTrainer) -> dict[str, dict[str, Any]]:
    """Degradations on the constraint and monitor splits now, per safety set.

    `feasible` says whether the violation rates of both splits are within alpha. The certify split stays closed.
    """
    measured = {}
    for name, one in trainer.safety.items():
        rates = {
            role: summarise(trainer.degradations(name, role), one) if examples else None
            for role, examples in (("constraint", one.constraint_set), ("monitor", one.monitor_set))
        }
        measured[name] = {
            "tau": one.constraint.tau,
            "unit": one.constraint.unit,
            "alpha": one.constraint.alpha,
            "noise_floor": one.noise_floor,
            **rates,
            "feasible": all(found["violation_rate"] <= one.constraint.alpha for found in rates.values() if found),
        }
    return measured
