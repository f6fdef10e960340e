"""A Trainer that says how the safety sets and the model's behaviour are doing: in evaluations, and in the model card.

Metrics of an evaluation must be in the dictionary that early stopping reads, which a callback comes too late for: so
evaluation is overridden here, and what is measured is composed (`monitoring`, `behaviour`). The loss is TRL's, or
TRL's by rows (`row_weights`). The card is TRL's, which writes it from `_name` and `_paper`; the paper has no arXiv id
here, so it is cited in BibTeX.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.repocard import metadata_load, metadata_save
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from holdfast.certification.kept import BehaviourValues, Limits
from holdfast.core.adapter_card import kept_results, model_index
from holdfast.data.templates import Template
from holdfast.screening.sets import MonitorPrompts
from holdfast.training.behaviour import BehaviourMonitor, Every, metrics
from holdfast.training.config import is_behaviour_metric
from holdfast.training.fitting import in_several_processes
from holdfast.training.hooks import Defense, Inputs, Items, Row
from holdfast.training.monitoring import StepRecorder, degradations_of, monitor_metrics
from holdfast.training.row_weights import RowMeans, one_a_row
from holdfast.training.run import Run
from holdfast.training.safety import DEFAULT
from holdfast.training.support import cudnn_attention

PAPER = "Beyond Average Safety"
CITATION = """\
@misc{entesari-beyond-average-safety,
    title        = {{Beyond Average Safety: Chance-Constrained LLM Fine-tuning}},
    author       = {Taha Entesari and Mahyar Fazlyab},
}"""


def citation_of(defense: Defense) -> str:
    """BibTeX of what a defense implements; empty for plain training."""
    if defense.reference.startswith(PAPER):
        return CITATION
    return f"@misc{{{defense.name},\n    note         = {{{defense.reference}}},\n}}" if defense.reference else ""


class MonitoredTrainer(Trainer):
    """Evaluation with the monitor split's figures, and on request the model's replies."""

    defense: Defense
    recorder: StepRecorder
    run: Run
    behaviour_monitor: BehaviourMonitor | None = None
    control: Any
    _safety_only_evaluation: bool = False
    _flops_per_token: int | None = None

    def train(self, *args: object, **kwargs: object) -> TrainOutput:
        """As the Trainer's, with attention kernels whose gradients are finite."""
        try:
            with cudnn_attention(False):
                return super().train(*args, **kwargs)
        except RuntimeError as error:
            if (refusal := in_several_processes(error)) is not None:
                raise refusal from error
            raise

    @property
    def method(self) -> str:
        """What TRL calls the task's training: `SFT`, `DPO` or `GRPO`."""
        return getattr(super(), "_name", "")

    @property
    def _name(self) -> str:
        return f"{self.method} with {self.defense.name}" if self.defense.reference else self.method

    @property
    def _paper(self) -> dict[str, str]:
        """TRL's for plain training; else without its id, or the card would say that DPO's paper has the defense."""
        own: dict[str, Any] = getattr(super(), "_paper", {})
        cited = citation_of(self.defense)
        if not cited:
            return own
        return {"title": self.defense.reference, "citation": "\n\n".join(filter(None, (cited, own.get("citation"))))}

    def create_model_card(self, *args: object, **kwargs: object) -> None:
        """As TRL's, with the refusals and answers kept where the behaviour monitor has asked the model as it is."""
        super().create_model_card(*args, **kwargs)
        monitor, path = self.behaviour_monitor, Path(self.args.output_dir) / "README.md"
        results = kept_results({} if monitor is None else monitor.known.get(monitor.step, {}))
        if results and self.is_world_process_zero():
            metadata_save(path, {**(metadata_load(path) or {}), "model-index": model_index(results)})

    @property
    def by_rows(self) -> bool:
        """Whether the task loss is a mean over rows."""
        return bool(getattr(self.args, "loss_weights", None) == "rows")

    def get_batch_samples(
        self, epoch_iterator: Iterator[Inputs], num_batches: int, device: torch.device
    ) -> tuple[list[Inputs], Items]:
        """The micro-batches of a step, and what its loss is divided by: tokens, or rows."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.by_rows and items is not None:
            items = self._get_num_items_in_batch([one_a_row(batch) for batch in batches], device)
        return batches, items

    def compute_loss(self, model: nn.Module, inputs: Inputs, *args: Any, **kwargs: Any) -> Any:
        """TRL's; in training by rows, of log-probabilities that are divided by their row's count."""
        by_rows = self.by_rows and model.training
        weighed = RowMeans(model, kwargs.get("num_items_in_batch")) if by_rows else model
        return super().compute_loss(weighed, inputs, *args, **kwargs)

    @property
    def step_listeners(self) -> list[Callable[[Row], None]]:
        """Called with each row of the event log."""
        return self.recorder.listeners

    def degradations(self, name: str = DEFAULT, role: str = "monitor") -> Tensor:
        """`D_i` of every example of the constraint or monitor split, at the current parameters."""
        return degradations_of(self.run, name, role)

    def safety_metrics(self, prefix: str = "eval") -> dict[str, float]:
        """The monitor split's figures, and the kept shares where they are known, or asked for by name."""
        figures, monitor = monitor_metrics(self.run, prefix), self.behaviour_monitor
        if monitor is None:
            return figures
        if monitor.step in monitor.known or (self.is_in_train and is_behaviour_metric(self.args.metric_for_best_model)):
            return figures | metrics(monitor.measure(log=False), prefix)
        return figures if self.is_in_train else figures | metrics(monitor.ask(), prefix)

    def watch_behaviour(
        self, prompts: MonitorPrompts, limits: Limits | None = None, *, every: Every = "end",
        template: Template = "chat",
    ) -> BehaviourMonitor:  # fmt: skip
        """Watch the model's replies from now on; to be called before `train`. Arguments are `BehaviourMonitor`'s."""
        monitor = BehaviourMonitor(self, prompts, limits, every=every, template=template)
        if self.behaviour_monitor is not None:
            self.remove_callback(self.behaviour_monitor)
        self.add_callback(monitor)
        self.behaviour_monitor = monitor
        return monitor

    def behaviour_result(self) -> BehaviourValues:
        """What result.json says about behaviour: nothing where it was not watched."""
        return {} if self.behaviour_monitor is None else self.behaviour_monitor.result()

    def log(self, logs: dict[str, float], *args: object, **kwargs: object) -> None:
        """As the Trainer's; what `trainer_state.json` keeps has null for a non-finite number, as JSON demands."""
        super().log(logs, *args, **kwargs)
        kept = self.state.log_history[-1]
        kept.update({k: None for k, v in kept.items() if isinstance(v, float) and not math.isfinite(v)})

    def evaluation_loop(self, *args: object, metric_key_prefix: str = "eval", **kwargs: object) -> EvalLoopOutput:
        """The task's evaluation, with the monitor split's figures in its metrics (early stopping reads them there)."""
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        # With several evaluation sets the prefix is eval_<set>; the monitor split does not depend on the set.
        output.metrics.update(self.safety_metrics(metric_key_prefix.split("_", maxsplit=1)[0]))
        return output

    def evaluate(
        self, eval_dataset: object = None, *args: object, metric_key_prefix: str = "eval", **kwargs: object
    ) -> dict[str, float]:
        """As the Trainer's, leaving the random state alone; without a task evaluation set, the monitor split alone."""
        if eval_dataset is not None or not self._safety_only_evaluation:
            devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
            # A data loader draws its seed from the global state, which would change the dropout masks that follow.
            with torch.random.fork_rng(devices=devices):
                found: dict[str, float] = super().evaluate(
                    eval_dataset, *args, metric_key_prefix=metric_key_prefix, **kwargs
                )
            return found
        self.model.eval()  # TRL's log() tells evaluation from training by this flag; training_step sets it again
        figures = self.safety_metrics(metric_key_prefix)
        self.log(dict(figures))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, figures)
        return figures

    def floating_point_ops(self, inputs: Inputs) -> int:
        """As the Trainer's, whose count of the parameters is made once: that walk can outlast a small model's step."""
        if "input_ids" not in inputs:  # rows whose replies are still to be generated
            return 0
        tokens = int(inputs["input_ids"].numel())
        if self._flops_per_token is None:
            self._flops_per_token = int(super().floating_point_ops(inputs)) // tokens
        return self._flops_per_token * tokens
