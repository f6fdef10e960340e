"""`SafeSFTTrainer`: TRL's `SFTTrainer` with a safety set, a chance constraint and a defense.

Three files override methods of `transformers.Trainer`: this one the training step, `checkpointing` what is saved and
loaded, `monitoring` what is evaluated and logged; `side_data` adds what defenses ask for. All are cooperative:
`ConstrainedMixin` goes in front of `SFTTrainer` or any trainer derived from it. What happens at each step is the
defense's business (see `hooks`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from trl import SFTConfig, SFTTrainer
from trl.trainer.utils import create_model_from_path

from holdfast.constraint.chance import ChanceConstraint
from holdfast.constraint.completion import adapter_layers
from holdfast.constraint.passes import Forward
from holdfast.constraint.reference import cache_folder
from holdfast.core.errors import ConfigError
from holdfast.core.ranks import gather_objects, rank, world
from holdfast.data.encode import require_usable_tokenizer, template_sha256, tokenizer_sha256
from holdfast.data.streams import StepStream
from holdfast.models.fingerprint import (
    adapter_fingerprint,
    frozen_fingerprint,
    has_idle_adapter,
    model_fingerprint,
)
from holdfast.trainers import safety as safety_sets
from holdfast.trainers.auto import AUTO, constraints_of, screened, watch_screened, where_needed
from holdfast.trainers.checkpointing import CheckpointMixin
from holdfast.trainers.config import SafeSFTConfig
from holdfast.trainers.fitting import Fitting, in_several_processes, loss_is_scaled
from holdfast.trainers.hooks import Defense, Items, make_defense
from holdfast.trainers.joint_step import JointStepMixin
from holdfast.trainers.monitoring import MonitorMixin, StepRecorder
from holdfast.trainers.safety import SafetySet
from holdfast.trainers.same_inputs import require_same_inputs
from holdfast.trainers.side_data import SideDataMixin, require_side_data, require_stage
from holdfast.trainers.support import (
    keep_adapters_in_float32,
    require_device,
    require_supported_arguments,
    require_supported_engine,
    require_supported_model,
)
from holdfast.trainers.task_prompts import trained_texts
from holdfast.trainers.watching import BehaviourMixin

logger = logging.getLogger(__name__)


class ConstrainedMixin(BehaviourMixin, CheckpointMixin, MonitorMixin, JointStepMixin, SideDataMixin):
    """Adds safety sets and a defense to a trainer; put it before `SFTTrainer` among the bases."""

    _tag_names: ClassVar[list[str]] = ["trl", "sft", "holdfast"]

    # Provided by the trainer this is mixed into.
    accelerator: Any
    processing_class: Any
    is_fsdp_enabled: bool

    def __init__(
        self,
        model: Any = None,
        args: SFTConfig | None = None,
        *,
        safety_dataset: Any = AUTO,
        constraint: ChanceConstraint | Mapping[str, ChanceConstraint] | None = None,
        defense: str | Defense | Mapping[str, Any] = "holdfast",
        harmful_dataset: Any = None,
        unaligned: Any = None,
        **kwargs: Any,
    ) -> None:
        """Arguments of `SFTTrainer` (by keyword, after `model` and `args`), and:

        Args:
            safety_dataset: `auto` (the default, where the defense needs a safety set): the model is asked the prompts
                of `train_dataset` and the bundled ones, conflicting rows are left out, and its own refusals and
                answers are held; or a `Screening`, to do that with other settings; or prompt/completion, messages or
                text rows, examples, a `Split`, a mapping with the keys constraint, monitor and certify, or a mapping
                of names to any of these (several constraints).
            constraint: one for all safety sets, or one per name; None is `ChanceConstraint()`, with a
                `peft_config` in the defense's unit (kl_token for nearly all).
            defense: a name of the registry, `{"name": ..., option: ...}`, or a `Defense`.
            harmful_dataset: harmful pairs, in the formats of `safety_dataset`, for defenses that train against them.
            unaligned: the weights before alignment, for defenses that need them: a model (its reference or the object),
                or the folder of the alignment adapter that was merged into `model`.
        """
        args = SafeSFTConfig("trainer_output") if args is None else args
        if not isinstance(args, SafeSFTConfig):
            args = SafeSFTConfig.from_sft(args)
        require_supported_arguments(args)
        require_device(args)
        self.defense = make_defense(defense)
        require_stage(self.defense, args.stage)
        safety_dataset = where_needed(safety_dataset, self.defense, args.stage)
        given = {"safety": safety_dataset, "harmful": harmful_dataset, "unaligned": unaligned}
        require_side_data(self.defense, args.stage, given)
        if kwargs.get("train_dataset") is None:
            raise ConfigError("no task data to train on", remedy="pass train_dataset=...")
        model, self.screening = screened(model, safety_dataset, args, kwargs, create=create_model_from_path)
        safety_dataset = safety_dataset if self.screening is None else self.screening.sets
        constraint = constraints_of(self.screening, constraint, self.defense, kwargs)
        self.safety: dict[str, SafetySet] = {}
        self._attached_to: Any = None
        self._flops_per_token: int | None = None
        self.fitting = Fitting(self)
        prompts = trained_texts(kwargs, args.dataset_text_field, harmful_dataset)
        splits = {} if safety_dataset is None else safety_sets.splits_of(safety_dataset, constraint, args, prompts)
        self._require_usable_tokenizer(args, kwargs)
        with self._evaluation_without_task_set(args, kwargs.get("eval_dataset"), bool(splits)):
            super().__init__(model, args, **kwargs)  # type: ignore[call-arg]
        require_supported_engine(self.accelerator, adapter=hasattr(self.model, "peft_config"))
        require_supported_model(self.model, vision=bool(getattr(self, "_is_vision_dataset", False)))
        if keep_adapters_in_float32(self.model):
            logger.info(
                "adapters of the quantised base are kept in float32: bfloat16 cannot hold the filter's corrections"
            )
        self.run_dir = Path(args.run_dir or args.output_dir)
        self.recorder = StepRecorder(self)
        self.add_callback(self.recorder)  # type: ignore[attr-defined]
        self.safety = {
            name: safety_sets.encode_set(name, c, split, self.processing_class, max_length=args.max_length)
            for name, (split, c) in splits.items()
        }
        self._streams = {name: self._stream(s) for name, s in self.safety.items()}
        self._prepare_side_data(harmful_dataset, unaligned)
        require_same_inputs(self)
        self.defense.validate(self)
        self._identify_unaligned()
        self._theta_0 = gather_objects(self._provenance())[0]
        self._measured = False
        if not self.is_fsdp_enabled:  # a sharded model is measured once it is sharded: see `_load_from_checkpoint`
            self._measure_reference()
        self.defense.initialise(self)
        watch_screened(self)

    # -- safety sets -----------------------------------------------------------------------------------------------

    def _require_usable_tokenizer(self, args: SafeSFTConfig, given: Mapping[str, Any]) -> None:
        """Refuse a tokenizer that cannot encode the task data, in our words and before TRL meets it."""
        tokenizer = given.get("processing_class")
        if tokenizer is not None and not (args.chat_template_path or args.eos_token or args.pad_token):
            first = next(iter(given["train_dataset"]))
            chat = "messages" in first or "conversations" in first or isinstance(first.get("prompt"), list)
            require_usable_tokenizer(tokenizer, needs_chat=chat)

    def _stream(self, safety: SafetySet) -> StepStream:
        size = self.args.safety_batch_size or self.task_batch
        if size % world():
            raise ConfigError(
                f"safety_batch_size {size} cannot be shared equally by {world()} processes",
                remedy=f"use a multiple of {world()}",
            )
        estimator = getattr(self.defense.config, "estimator", None)
        if size * safety.constraint.alpha < 1 and estimator == "batch":
            logger.warning(
                "%s: %d examples per step with alpha=%g: a single violator exceeds the budget of its batch; "
                "estimator ema or table averages over steps",
                safety.name,
                size,
                safety.constraint.alpha,
            )
        return StepStream(len(safety.constraint_set), size, self.args.stream_seed, safety.name)

    def forward_of(self, model: Any) -> Forward:
        """How this run measures safety examples."""
        return Forward(
            model,
            pad_token_id=self.processing_class.pad_token_id,
            batch_size=min(
                self.args.safety_eval_batch_size, self.fitting.eval_rows or self.args.safety_eval_batch_size
            ),
            device=self.args.device,
            precision=self.accelerator.autocast,
        )

    def _provenance(self) -> dict[str, Any]:
        """What theta_0 is."""
        tokenizer, model = self.processing_class, self.model
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        idle = has_idle_adapter(model)  # then theta_0 is the base, and runs with other ranks and seeds share its losses
        return {
            "model": str(getattr(inner.config, "_name_or_path", "")) or type(inner).__name__,
            "weights": frozen_fingerprint(model) if idle else model_fingerprint(model),
            "adapter": None if idle else adapter_fingerprint(model),
            "tokenizer": tokenizer_sha256(tokenizer),
            "template": template_sha256(tokenizer),
            "max_length": self.args.max_length,
            "dtype": str(inner.dtype).removeprefix("torch."),
            "autocast": str(self.accelerator.mixed_precision),
            "attention": str(getattr(inner.config, "_attn_implementation", None)),
            "quantized": getattr(inner.config, "quantization_config", None) is not None,
        }

    def _measure_reference(self) -> None:
        """Measure every safety set at theta_0, once, before any checkpoint can be loaded."""
        if self._measured:
            return
        self._measured = True
        for one in self.safety.values():
            if self.defense.constrains:
                one.constraint.require_feasible_start()
                one.constraint.warn_of_free_degradation(one.name)
                if adapter_layers(self.model) and (note := one.constraint.likelihood_note()) is not None:
                    _announce(f"{one.name}: {note}")
            safety_sets.measure(
                one,
                self.forward_of(self.model),
                self._theta_0,
                run_dir=self.run_dir,
                cache=cache_folder(self.args.reference_cache),
                seed=self.args.stream_seed,
                micro_batch=self._micro_batch,
                log=_announce,
            )
        if self.safety and not self.defense.constrains:
            _announce(f"defense {self.defense.name!r} does not enforce these limits: the run is only measured by them")

    # -- hooks into the Trainer ------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's, followed by the defense's change of the trained model."""
        self._micro, self._joint_step = 0, None  # what a run that broke off in mid-step had accumulated
        try:
            found = super().train(*args, **kwargs)
        except RuntimeError as error:
            if (refusal := in_several_processes(error)) is not None:
                raise refusal from error
            raise
        self.defense.transform(self)
        self.measure_transformed()
        return found

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Let the defense attach to the optimizer as soon as it exists."""
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        raw = _raw(optimizer)
        if self._attached_to is not raw:
            self._attached_to = raw
            self.defense.attach(self)
            raw.register_step_pre_hook(lambda *_: None if self.recorder.spiked else self.defense.before_step(self))
            raw.register_step_post_hook(lambda *_: None if self.recorder.spiked else self.defense.after_step(self))
        return optimizer

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """One micro-batch; on the last one of a step also the defense's turn on the whole gradient."""
        self.batch_keys = frozenset(inputs)  # the collator's, whichever batch the defense takes instead
        inputs, items = self.defense.choose_batch(self, inputs, num_items_in_batch)
        parent = super().training_step  # type: ignore[misc]
        self.items = items

        self.fitting.begin(inputs, items, self._micro)

        def passing(part: dict[str, Any], count: Items) -> Tensor:
            loss: Tensor = parent(model, part, count, *args, **kwargs)
            return loss

        def padded_step() -> Tensor:
            return self.fitting.step(passing)

        def backward() -> Tensor:
            return self.joint_micro_step(inputs, items, {}) if self.joint else padded_step()

        self.padded_step = padded_step

        loss = self.defense.micro_step(self, inputs, backward)
        self.recorder.add_loss(loss, float(_raw(self.optimizer).param_groups[0]["lr"]))
        self._micro += 1
        if self.accelerator.sync_gradients:
            self._micro = 0
            if self.recorder.spikes_now():
                _raw(self.optimizer).zero_grad(
                    set_to_none=True
                )  # the optimizer then touches neither weights nor moments
                self.defense.skip_step(self)
            else:
                self.defense.on_gradient(self)
            self._joint_step = None
        return loss

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The task loss as the defense has it, plus the defense's own term, in training only."""
        default = super().compute_loss  # type: ignore[misc]
        if not model.training:
            return default(model, inputs, *args, **kwargs)
        found: Any = None

        def own() -> Tensor:
            nonlocal found
            found = default(model, inputs, *args, **kwargs)
            loss: Tensor = found[0] if isinstance(found, tuple) else found
            return loss

        loss = self.defense.task_loss(self, model, inputs, kwargs.get("num_items_in_batch"), own)
        if self.fitting.share != 1.0:
            loss = loss * self.fitting.share
        extra = self.defense.extra_loss(self, model, inputs)
        if extra is not None:
            loss = loss + (extra * self._divisor(kwargs.get("num_items_in_batch"))).to(loss)
        return (loss, found[1]) if isinstance(found, tuple) else loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As the Trainer's, whose count of the parameters is made once: that walk can outlast a small model's step."""
        numbers = int(inputs["input_ids"].numel())
        if self._flops_per_token is None:
            self._flops_per_token = int(super().floating_point_ops(inputs)) // numbers  # type: ignore[misc]
        return self._flops_per_token * numbers

    def _divisor(self, items: Items) -> int:
        """What `Trainer.training_step` divides the micro-batch's loss by: 1 where the loss is scaled for accumulation.

        A defense's own term is scaled already, and is multiplied by this first.
        """
        return 1 if loss_is_scaled(self, items) else int(self.current_gradient_accumulation_steps)


def _announce(text: str) -> None:
    """Say what the constraint is and how noisy it is: to the log where one listens, otherwise to stderr."""
    if logger.isEnabledFor(logging.INFO):
        logger.info(text)
    elif rank() == 0:
        print(f"holdfast: {text}", file=sys.stderr)


def _raw(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside accelerate's wrapper."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


class SafeSFTTrainer(ConstrainedMixin, SFTTrainer):
    """Drop-in for `trl.SFTTrainer`: pass `safety_dataset`, `constraint` and, if not holdfast, `defense`."""
