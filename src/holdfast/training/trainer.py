"""`SafeTrainer`: one of TRL's trainers with safety sets, chance constraints and a defense; of SFT, `SafeSFTTrainer`.

This file overrides what the Trainer does in a step, `monitored` in an evaluation, `checkpointing` what is saved and
loaded, `zero` where DeepSpeed steps. The rest is composed: `run` is what defenses and engines see, `recorder` writes a
row per step. What happens at each step is the defense's business (`hooks`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.trainer_utils import TrainOutput
from trl import SFTTrainer
from trl.trainer.utils import create_model_from_path

from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError
from holdfast.core.library_types import LanguageModel
from holdfast.core.ranks import gather_objects
from holdfast.training import safety as safety_sets
from holdfast.training import support
from holdfast.training.auto import AUTO, constraints_of, screened, watch_screened, where_needed
from holdfast.training.behaviour import require_monitor
from holdfast.training.checkpointing import CheckpointMixin
from holdfast.training.config import SafeSFTConfig, SafetyArguments
from holdfast.training.fingerprint import Unaligned, require_same_inputs, theta_0_provenance
from holdfast.training.fitting import Fitting, loss_is_scaled
from holdfast.training.fused_setup import BATCH
from holdfast.training.hooks import Defense, Inputs, Items, make_defense
from holdfast.training.monitored import MonitoredTrainer
from holdfast.training.monitoring import StepRecorder
from holdfast.training.run import Run, torch_optimizer
from holdfast.training.safety import SafetySet, trained_texts
from holdfast.training.side_data import SideData, require_side_data, require_stage


class SafeTrainer(CheckpointMixin, MonitoredTrainer):
    """What all trainers share; a subclass names one of TRL's as its second base, and the class of its arguments."""

    arguments: ClassVar[type[SafetyArguments]]
    args: SafetyArguments
    optimizer: torch.optim.Optimizer
    batch_keys: frozenset[str] = BATCH  # what the batch in progress holds, as collated

    def __init__(
        self,
        model: str | LanguageModel | None = None,
        args: TrainingArguments | None = None,
        *,
        safety_dataset: object = AUTO,
        constraint: ChanceConstraint | Mapping[str, ChanceConstraint] | None = None,
        defense: str | Defense | Mapping[str, object] = "holdfast",
        harmful_dataset: object = None,
        unaligned: Unaligned | None = None,
        **kwargs: Any,
    ) -> None:
        """Arguments of TRL's trainer (by keyword, after `model` and `args`), and:

        Args:
            safety_dataset: `auto` (the default, where the defense needs a safety set): the model is asked the prompts
                of `train_dataset` and the bundled ones, conflicting rows are left out, and its own refusals and
                answers are held; or a `Screening`, to do that with other settings; or prompt/completion, messages or
                text rows, a file or hub id of them, examples, a `Split`, a mapping with the keys constraint, monitor
                and certify, or a mapping of names to any of these (several constraints).
            constraint: one for all safety sets, or one per name; None: the defaults, in the defense's unit (of KL
                for nearly all).
            defense: a name of the registry, `{"name": ..., option: ...}`, or a `Defense`.
            harmful_dataset: harmful pairs, in the formats of `safety_dataset`, for defenses that train against them.
            unaligned: the weights before alignment, for defenses that need them: a model (its reference or the object),
                or the folder of the alignment adapter that was merged into `model`.
        """
        support.require_import_order(type(self))
        args = self.arguments.of(args)
        support.require_supported_arguments(args)
        support.require_device(args)
        self.defense = make_defense(defense)
        require_stage(self.defense, args.stage)
        safety_dataset = where_needed(safety_dataset, self.defense, args.stage)
        given = {"safety": safety_dataset, "harmful": harmful_dataset, "unaligned": unaligned}
        require_side_data(self.defense, args.stage, given)
        if kwargs.get("train_dataset") is None:
            raise ConfigError("no task data to train on", remedy="pass train_dataset=...")
        model, self.screening = screened(model, safety_dataset, args, kwargs, create=create_model_from_path)
        safety_dataset = safety_dataset if self.screening is None else self.screening.sets
        constraint = constraints_of(self.screening, constraint, self.defense)
        self._attached_to: Any = None
        self._measured = False
        # The task's texts get no name here: it would keep them in memory while TRL prepares the task.
        splits = safety_sets.splits_of(safety_dataset, constraint, args, trained_texts(kwargs, args, harmful_dataset))
        safety_sets.require_task_tokenizer(args, kwargs)
        strategy, self._safety_only_evaluation = args.eval_strategy, kwargs.get("eval_dataset") is None and bool(splits)
        if self._safety_only_evaluation:  # the Trainer demands an evaluation set; the monitor split is one
            args.eval_strategy = "no"
        try:
            super().__init__(model=model, args=args, **kwargs)
        finally:
            args.eval_strategy = strategy
        support.require_supported_engine(self.accelerator, adapter=hasattr(self.model, "peft_config"))
        support.require_supported_model(self.model, vision=bool(getattr(self, "_is_vision_dataset", False)))
        support.keep_adapters_in_float32(self.model)
        encoded = {
            name: safety_sets.encode_set(name, c, split, self.processing_class, max_length=args.max_length)
            for name, (split, c) in splits.items()
        }
        self._compose(SideData(self, encoded, harmful_dataset, unaligned))

    def _compose(self, data: SideData) -> None:
        """Make the parts of the run and let the defense look at it; theta_0 is measured before it changes anything."""
        self.run_dir = Path(self.args.run_dir or self.args.output_dir)
        self.recorder = StepRecorder(self)
        self.add_callback(self.recorder)
        self.run = Run(self, data, Fitting(self))
        support.require_supported_defense(self)
        require_same_inputs(self)
        self.defense.validate(self.run)
        self.run.data.identify_unaligned()
        self._theta_0 = gather_objects(theta_0_provenance(self))[0]
        if not self.is_fsdp_enabled:  # a sharded model is measured once it is sharded: see `_load_from_checkpoint`
            self.measure_reference()
        self.defense.initialise(self.run)
        watch_screened(self)

    @property
    def safety(self) -> dict[str, SafetySet]:
        return self.run.data.safety

    def measure_reference(self) -> None:
        """Measure every safety set at theta_0, once, before any checkpoint can be loaded."""
        if not self._measured:
            self._measured = True
            safety_sets.measure_all(self)

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """As the Trainer's; then behaviour is measured, and the defense may change the trained model."""
        require_monitor(self.args, self.behaviour_monitor)
        self.run.progress.micro = 0  # a run that broke off in mid-step may have left it elsewhere
        output = super().train(*args, **kwargs)
        watched = self.behaviour_monitor if self._finished() else None
        if watched is not None:
            watched.conclude()
        self.defense.transform(self.run)
        if watched is not None and type(self.defense).transform is not Defense.transform:
            watched.measure_transformed()
        return output

    def create_optimizer(self, *args: object, **kwargs: object) -> torch.optim.Optimizer:
        """Let the defense attach to the optimizer as soon as it exists."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        raw = torch_optimizer(optimizer)
        if self._attached_to is not raw:
            self._attached_to = raw
            self.defense.attach(self.run)
            raw.register_step_pre_hook(lambda *_: None if self.recorder.spiked else self.defense.before_step(self.run))
            raw.register_step_post_hook(lambda *_: None if self.recorder.spiked else self.defense.after_step(self.run))
        return optimizer

    def training_step(self, model: nn.Module, inputs: Inputs, num_items_in_batch: Items = None) -> Tensor:
        """One micro-batch; on the last one of a step also the defense's turn on the whole gradient."""
        run, defense = self.run, self.defense
        self.batch_keys = frozenset(inputs if isinstance(inputs, dict) else ())  # as collated
        inputs, items = defense.choose_batch(run, inputs, num_items_in_batch)
        self._step_model, run.progress.items = model, items
        run.fitting.begin(inputs, items, run.progress.micro)
        loss = defense.micro_step(run, inputs, items)
        self.recorder.add_loss(run.progress.on_host(loss), float(torch_optimizer(self.optimizer).param_groups[0]["lr"]))
        run.progress.micro += 1
        if self.accelerator.sync_gradients:
            run.progress.micro = 0
            if self.recorder.spikes_now():
                torch_optimizer(self.optimizer).zero_grad(set_to_none=True)  # then it moves neither weights nor moments
                defense.skip_step(run)
            else:
                defense.on_gradient(run)
        return loss

    def plain_step(self, inputs: Inputs, items: Items) -> Tensor:
        """TRL's own forward and backward of some rows of the micro-batch in progress; the detached loss."""
        loss: Tensor = super().training_step(self._step_model, inputs, items)
        return loss

    def compute_loss(self, model: nn.Module, inputs: Inputs, *args: Any, **kwargs: Any) -> Any:
        """The task loss as the defense has it, plus the defense's own term, in training only."""
        default = super().compute_loss
        if not model.training:
            return default(model, inputs, *args, **kwargs)
        given: Any = None

        def own() -> Any:
            nonlocal given
            given = default(model, inputs, *args, **kwargs)
            return given[0] if isinstance(given, tuple) else given

        items = kwargs.get("num_items_in_batch")
        loss = self.defense.task_loss(self.run, model, inputs, items, own)
        if self.run.fitting.share != 1.0:
            loss = loss * self.run.fitting.share
        extra = self.defense.extra_loss(self.run, model, inputs)
        if extra is not None:
            loss = loss + (extra * self.loss_divisor(items)).to(loss)
        return (loss, given[1]) if isinstance(given, tuple) else loss

    def loss_divisor(self, items: Items) -> int:
        """What `Trainer.training_step` divides a micro-batch's loss by; a defense's own term is scaled already."""
        return 1 if loss_is_scaled(self, items) else int(self.current_gradient_accumulation_steps)


class SafeSFTTrainer(SafeTrainer, SFTTrainer):
    """Drop-in for `trl.SFTTrainer`: pass `safety_dataset`, `constraint` and, if not holdfast, `defense`."""

    _tag_names: ClassVar[list[str]] = ["trl", "sft", "holdfast"]
    arguments = SafeSFTConfig
