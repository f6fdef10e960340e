"""The fine-tuning stage: the models it begins with, then model, data, constraint and defense in, trained model out."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

import datasets
import pyarrow as pa
import torch
from datasets import Dataset, Features
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError, ResourceError, UnsupportedError
from holdfast.core.library_types import LanguageModel, LoraConfig, Tokenizer
from holdfast.core.ranks import rank
from holdfast.data.encode import WINDOW
from holdfast.data.examples import TOOLS, Example, has_tools, to_rows, uniform
from holdfast.data.templates import use_template
from holdfast.models.adapter import adapter_folder, base_of
from holdfast.models.alignment_shift import require_merged
from holdfast.models.handle import load_adapter_pair, load_pair
from holdfast.models.lora_layers import named_targets
from holdfast.models.source import resolve as resolve_model
from holdfast.runs.config import RunConfig
from holdfast.runs.config.resolve import ResolvedRun, peft_config
from holdfast.runs.stages.estimate import forecast
from holdfast.runs.stages.prepare import Prepared
from holdfast.runs.stages.run_folder import disk_errors
from holdfast.screening.screen import Screening
from holdfast.training.config import SafeSFTConfig
from holdfast.training.fingerprint import Unaligned
from holdfast.training.hooks import Defense
from holdfast.training.trainer import SafeSFTTrainer

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
Listener = Callable[[dict[str, Any]], None]
"""Receives every row of events.jsonl (one a step, and those of the behaviour monitor); before the first
`{"stage": "train", "total_steps": n}`, and while the monitor asks `{"step": k, "asked": m, "of": n}`."""


class Interruption(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """A context in which the first SIGINT or SIGTERM asks the trainer (a callback) to save and stop; the second ends.

    Where there is no step to finish, the first one does. Outside the main thread, without handlers, it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._training = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested or not self._training:
            raise KeyboardInterrupt
        self.requested = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """From here on there is a step to finish and something to save."""
        self._training = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """From here on a signal has nothing to wait for."""
        self._training = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Ask for a checkpoint and the end of training once a signal has arrived at any process."""
        if torch.distributed.is_initialized():
            # Signals reach processes at different steps; all must stop at the same one, or some would wait.
            flag = torch.tensor(float(self.requested), device=args.device)
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
            self.requested = bool(flag.item())
        if self.requested:
            logger.warning("asked to stop: saving a checkpoint after step %d", state.global_step)
            control.should_save = True
            control.should_training_stop = True


def load_start(config: RunConfig, trust_remote_code: bool) -> tuple[LanguageModel, Tokenizer, LoraConfig | None]:
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
        what = f"defense {config.defense.name} needs the weights before alignment, and {config.model} is no adapter"
        raise ConfigError(what, remedy="name the model it was aligned from: `unaligned: owner/base`")
    below, below_revision = base_of(folder)
    if adapter_folder(resolve_model(below, below_revision, trust_remote_code)) is not None:
        logger.warning(
            "%s is an adapter on the adapter %s: the last one alone is taken for the alignment; "
            "where it is not, name the weights before alignment (`unaligned`)", folder, below,
        )  # fmt: skip
    return str(folder)


class AnnounceSteps(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """Tells listeners how many steps there will be, and where a resumed run starts, which only the trainer knows."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = listeners

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        for listener in self._listeners:
            listener({"stage": "train", "total_steps": state.max_steps, "step": state.global_step})


def short_run(folder: str | Path, **settings: Any) -> SafeSFTConfig:
    """Arguments of a run of minutes that reports nothing and, unless told to, saves nothing; with a linear schedule."""
    settings = {"save_strategy": "no", **settings}
    return SafeSFTConfig(
        output_dir=str(folder), report_to="none", logging_steps=10_000, disable_tqdm=True,
        gradient_checkpointing=False, dataloader_pin_memory=False, use_cpu=not torch.cuda.is_available(),
        lr_scheduler_type="linear", **settings,
    )  # fmt: skip


def listen(trainer: SafeSFTTrainer, listeners: Sequence[Listener]) -> None:
    """Let listeners follow the training, in the place of the trainer's own progress output."""
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(AnnounceSteps(listeners))
    trainer.step_listeners.extend(listeners)


def build_trainer(
    *,
    model: LanguageModel, tokenizer: Tokenizer, data: Prepared,
    constraints: Mapping[str, ChanceConstraint], defense: str | Defense | Mapping[str, object],
    arguments: SafeSFTConfig, peft_config: LoraConfig | None, rows: Path,
    unaligned: Unaligned | None = None, callbacks: Sequence[TrainerCallback] = (),
    listeners: Sequence[Listener] = (),
) -> SafeSFTTrainer:  # fmt: skip
    """The trainer of one run; where there are listeners, they replace the trainer's own progress output.

    The task's rows lie in the folder `rows`, as text and as tokens, for as long as the trainer is used.
    """
    if rank() == 0:
        logger.info("tokenising %d task rows", len(data.task))
    full = disk_errors(f"the task's rows in {rows}", rows.parent / "checkpoints")
    with named_targets(model), missing_packages(), full:
        trainer = SafeSFTTrainer(
            model=model, args=arguments, train_dataset=mapped_rows(data.task, rows),
            processing_class=tokenizer, peft_config=peft_config, safety_dataset=data.safety or None,
            harmful_dataset=data.harmful, unaligned=unaligned, constraint=dict(constraints), defense=defense,
            callbacks=list(callbacks),
        )  # fmt: skip
    if listeners:
        listen(trainer, listeners)
    return trainer


def mapped_rows(examples: Sequence[Example], folder: Path) -> Dataset:
    """Examples in TRL's format, mapped from a file in `folder`.

    What `Dataset.map` makes of a mapped file it writes beside it; of rows in memory every copy stays in memory.
    """
    every, file = uniform(examples), folder / "task.arrow"
    features = _tool_features(every)
    schema = Dataset.from_list(to_rows(every[:1]), features=features).data.schema
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for start in range(0, len(every), WINDOW):
            rows = to_rows(every[start : start + WINDOW])
            writer.write_table(Dataset.from_list(rows, features=features).data.table)
    return Dataset.from_file(str(file))


def _tool_features(examples: Sequence[Example]) -> Features | None:
    """Columns of JSON where a conversation has tools: turns then have other keys, and calls other arguments."""
    if not any(has_tools((*e.prompt, *e.completion)) for e in examples if e.kind == "chat"):
        return None
    if (json := getattr(datasets, "Json", None)) is None:
        what = f"task rows with tools need datasets 4.7, found {datasets.__version__}"
        raise UnsupportedError(what, remedy="pip install --upgrade datasets")
    return Features({"prompt": datasets.List(json()), "completion": datasets.List(json()), TOOLS: json()})


@contextmanager
def missing_packages() -> Iterator[None]:
    """Turn the Trainer's report of a package that is not installed into a `ResourceError`."""
    try:
        yield
    except ImportError as error:
        reason = " ".join(str(error).split())[:300]
        raise ResourceError(reason, remedy="install the package, or change the setting under `train`") from error


def watch(trainer: SafeSFTTrainer, plan: ResolvedRun, screening: Screening | None) -> None:
    """Have the trainer watch the prompts that screening chose, if any."""
    if screening is not None and screening.monitor.any:
        when, template = plan.config.monitor.every, plan.config.template
        trainer.watch_behaviour(screening.monitor, plan.behaviour_limits, every=when, template=template)


def train(trainer: SafeSFTTrainer, *, resume: bool) -> tuple[int, float]:
    """Train to the end, from the start or from the newest checkpoint that verifies; steps in all, and seconds."""
    start = time.monotonic()
    if rank() == 0:
        logger.info("training, %s", forecast(trainer))
    with missing_packages():  # the optimizer's own package is looked for only now
        trainer.train(resume_from_checkpoint=True if resume else None)
    return trainer.state.global_step, time.monotonic() - start
