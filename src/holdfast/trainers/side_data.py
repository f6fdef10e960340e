"""What a defense may see of a run beside the task: its stage, side data, and passes over them (see `hooks`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.constraint.completion import adapters_off, deterministic, require_understood_head
from holdfast.constraint.gradients import ParameterSpace, Vector, trainable
from holdfast.constraint.passes import Forward
from holdfast.core.errors import ConfigError, DataError, UnsupportedError
from holdfast.core.hashing import sha256_json
from holdfast.core.ranks import gather_objects, rank, world
from holdfast.data import streams
from holdfast.data.collate import collate
from holdfast.data.encode import IGNORE, Encoded, encode_all, require_usable_tokenizer
from holdfast.data.examples import Example
from holdfast.models.fingerprint import has_idle_adapter
from holdfast.trainers.fingerprint import unaligned_sha256
from holdfast.trainers.fitting import Fitting
from holdfast.trainers.hooks import Defense, Inputs, Items
from holdfast.trainers.safety import SafetySet, as_examples
from holdfast.trainers.safety_pass import SafetyBatch, safety_forward, safety_gradient
from holdfast.trainers.side_pass import RowLoss, TokenMean, scored_tokens, side_gradient

STAGES = ("align", "finetune")


def require_stage(defense: Defense, stage: str) -> None:
    """Refuse a defense in a stage in which it does nothing."""
    if stage not in STAGES:
        raise ConfigError(f"stage is {stage!r}", remedy=f"use {' or '.join(STAGES)}")
    acts = {"finetune" if s == "posthoc" else s for s in defense.stages}  # post-hoc follows fine-tuning in one run
    if stage not in acts:
        raise ConfigError(
            f"defense {defense.name!r} acts in the {' and '.join(sorted(acts))} stage, this is the {stage} stage",
            remedy=f"set stage: {sorted(acts)[0]}, or use another defense (holdfast ls defenses)",
        )


def require_side_data(defense: Defense, stage: str, given: Mapping[str, Any]) -> None:
    """Refuse a defense whose side data are missing.

    Args:
        given: need -> what the user passed for it, or None.
    """
    words = {
        "safety": ("a safety set", "pass safety_dataset=..., or defense='sft'"),
        "harmful": ("harmful pairs", "pass harmful_dataset=... (prompts with the replies to be unlearned)"),
        "unaligned": (
            "the weights before alignment",
            "pass unaligned=... (the base model, or the alignment adapter that was merged into the model)",
        ),
    }
    for need in sorted(defense.needed(stage)):
        if given.get(need) is None:
            what, remedy = words[need]
            raise ConfigError(f"defense {defense.name!r} needs {what}", remedy=remedy)


class SideDataMixin:
    """The part of `TrainingRun` that is not the Trainer's own."""

    # Provided by the trainer this is mixed into.
    args: Any
    state: Any
    model: Any
    optimizer: Any
    accelerator: Any
    processing_class: Any
    defense: Defense
    is_fsdp_enabled: bool
    safety: dict[str, SafetySet]
    forward_of: Callable[[Any], Forward]
    fitting: Fitting
    current_gradient_accumulation_steps: int
    joint_result: Callable[[str], tuple[SafetyBatch, Vector] | None]
    packed_side_gradient: Callable[[Sequence[Encoded], TokenMean], tuple[Tensor, Vector]]
    _joint: Any
    _streams: dict[str, streams.StepStream]

    def _prepare_side_data(self, harmful: Any, unaligned: Any) -> None:
        """Tokenise the harmful pairs and note whether theta_0 is the model with its adapter off."""
        self.unaligned = unaligned
        self.harmful_examples: list[Example] = []
        self.harmful: list[Encoded] = []
        self._micro = 0
        if harmful is not None and "harmful" in self.defense.needed(self.stage):
            self.harmful_examples = as_examples(harmful, "harmful")
            if not self.harmful_examples:
                raise DataError("the harmful pairs are empty", remedy="give at least one")
            require_usable_tokenizer(
                self.processing_class, needs_chat=any(e.kind == "chat" for e in self.harmful_examples)
            )
            self.harmful = self.encode(self.harmful_examples)
            forward = self.forward_of(self.model)  # an alignment run has no safety set with which this is looked at
            with deterministic(self.model), forward.precision():
                require_understood_head(self.model, forward.batch(self.harmful[:1]))
        if self.is_fsdp_enabled and not self.defense.fsdp:
            raise UnsupportedError(
                f"defense {self.defense.name!r} under FSDP2: its algebra on sharded weights is not implemented",
                remedy="use DDP (accelerate launch --multi_gpu), or a defense that supports it: holdfast, sft",
            )
        self._idle_start = has_idle_adapter(self.model)
        self._first_weights: list[tuple[nn.Parameter, Tensor]] | None = None

    def _identify_unaligned(self) -> None:
        """Note which weights before alignment are used: now, since a folder may change while training runs."""
        self._unaligned_sha256: str | None = None
        if "unaligned" not in self.defense.needed(self.stage):
            return
        self._unaligned_sha256 = gather_objects(unaligned_sha256(self.unaligned) if rank() == 0 else None)[0]

    def side_fingerprint(self) -> dict[str, Any]:
        """What a resumed run must share: the side data. Empty for defenses without any."""
        found: dict[str, Any] = {}
        if self.harmful:
            found["harmful"] = sha256_json([[list(e.input_ids), list(e.labels)] for e in self.harmful])
        if self._unaligned_sha256 is not None:
            found["unaligned"] = self._unaligned_sha256
        return found

    # -- where the run is --------------------------------------------------------------------------------------------

    @property
    def stage(self) -> str:
        """`align` or `finetune`."""
        return str(self.args.stage)

    @property
    def step(self) -> int:
        """Optimizer steps completed."""
        return int(self.state.global_step)

    @property
    def epoch(self) -> float:
        """Passes over the task data completed, with fractions."""
        return float(self.state.epoch or 0.0)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return int(self.state.max_steps)

    @property
    def last_micro_batch(self) -> bool:
        """Whether the optimizer steps after the micro-batch in progress."""
        return bool(self.accelerator.sync_gradients)

    # -- data --------------------------------------------------------------------------------------------------------

    @property
    def safe(self) -> list[Encoded]:
        """The constraint examples of all safety sets; monitor and certify stay held out."""
        return [example for one in self.safety.values() for example in one.constraint_set]

    def encode(self, examples: Sequence[Example]) -> list[Encoded]:
        """Tokenise examples as the safety sets are."""
        return encode_all(examples, self.processing_class, max_length=self.args.max_length, role="safety").examples

    @property
    def task_batch(self) -> int:
        """Rows of a whole step, over all processes and micro-batches."""
        args = self.args
        return int(args.per_device_train_batch_size * world() * args.gradient_accumulation_steps)

    def draw(self, rows: Sequence[Encoded], name: str, size: int | None = None) -> list[int]:
        """Positions of this step's global batch of side rows."""
        size = size or self.args.safety_batch_size or self.task_batch
        if size % world():
            raise ConfigError(
                f"a batch of {size} {name} rows cannot be shared equally by {world()} processes",
                remedy=f"use a multiple of {world()}",
            )
        return streams.StepStream(len(rows), size, self.args.stream_seed, name).indices(self.step)

    def own_share(self, rows: Sequence[Encoded]) -> tuple[Inputs, Items]:
        """This process's rows of this micro-batch out of a step's batch, and the step's scored tokens."""
        each, micros = self.args.per_device_train_batch_size, self.current_gradient_accumulation_steps
        if len(rows) < each * micros * world():
            raise ConfigError(
                f"{len(rows)} rows for a step of {each * micros * world()}", remedy="draw task_batch rows"
            )
        used = rows[: each * micros * world()]
        mine = streams.shard(used, rank(), world())
        batch = collate(mine[self._micro * each : (self._micro + 1) * each], self.processing_class.pad_token_id)
        counted = used if self.args.average_tokens_across_devices else mine
        items = torch.tensor(scored_tokens(counted), device=self.args.device)
        return {name: tensor.to(self.args.device) for name, tensor in batch.items()}, items

    def token_share(self, inputs: Inputs, items: Items) -> float:
        """The factor from a mean over this micro-batch's tokens to its part of the step's loss."""
        if items is None:
            return 1.0  # the Trainer divides by the number of micro-batches
        here = int((inputs["labels"][:, 1:] != IGNORE).sum())
        processes = world() if self.args.average_tokens_across_devices else 1
        return here * processes / max(int(items), 1)

    # -- passes ------------------------------------------------------------------------------------------------------

    def space(self) -> ParameterSpace:
        """The trainable parameters as one vector."""
        return ParameterSpace(trainable(getattr(self.optimizer, "optimizer", self.optimizer)))

    @property
    def _micro_batch(self) -> int:
        """Side rows per process and pass."""
        return int(self.args.safety_micro_batch_size or self.args.per_device_train_batch_size)

    def side_gradient(self, rows: Sequence[Encoded], loss: RowLoss) -> tuple[Tensor, Vector]:
        """Losses of the rows and the gradient of their sum."""
        if isinstance(loss, TokenMean) and self._joint is not None:
            return self.packed_side_gradient(rows, loss)
        forward, space = self.forward_of(self.model), self.space()
        return self.fitting.side(self._micro_batch, lambda most: side_gradient(forward, rows, loss, space, most))

    def safety_batch(self, name: str) -> list[int]:
        """This step's global safety batch: a pure function of seed and step, the same for any number of processes."""
        return self._streams[name].indices(self.step)

    def safety_pass(self, name: str, weight: Callable[[Tensor], Tensor]) -> tuple[SafetyBatch, Vector]:
        """Degradations of this step's safety batch and the gradient of `mean_i weight(D)_i`."""
        found = self.joint_result(name)
        if found is not None:
            return found
        forward, one, positions, space = (
            self.forward_of(self.model),
            self.safety[name],
            self.safety_batch(name),
            self.space(),
        )
        return self.fitting.side(
            self._micro_batch, lambda most: safety_gradient(forward, one, positions, weight, space, most)
        )

    def safety_forward(self, name: str) -> Tensor:
        """Differentiable degradations of this process's share of the safety batch."""
        return safety_forward(self.forward_of(self.model), self.safety[name], self.safety_batch(name))

    @property
    def joint_backward(self) -> bool:
        """Whether a forward without dropout may share the task's backward: not under checkpointing with dropout."""
        if not self.args.gradient_checkpointing:
            return True
        if (self.args.gradient_checkpointing_kwargs or {}).get("use_reentrant") and world() > 1:
            return False  # two re-entrant passes reach a parameter one by one, and DDP counts it as ready twice
        return not any((isinstance(m, nn.Dropout) and m.p > 0) or _own_dropout(m) for m in self.model.modules())

    @contextmanager
    def at_reference(self) -> Iterator[None]:
        """The model as theta_0: the fresh adapter off; otherwise the first trainable weights, put back meanwhile."""
        if self._idle_start:
            with adapters_off(self.model):
                yield
            return
        if self._first_weights is None:
            raise UnsupportedError(
                "theta_0 was not kept", remedy="call keep_theta_0 in initialise, or start from a fresh adapter"
            )
        params, values = zip(*self._first_weights, strict=True)
        with ParameterSpace(params).exchanged(list(values)):
            yield

    def keep_theta_0(self) -> None:
        """Copy the trainable weights, for `at_reference` where no fresh adapter can be switched off.

        To be called in `initialise`: a checkpoint is loaded after it.
        """
        if self._idle_start or self._first_weights is not None:
            return
        if self.is_fsdp_enabled:
            raise UnsupportedError(
                f"defense {self.defense.name!r} with FSDP2 and no fresh adapter: theta_0 cannot be kept in shards",
                remedy="train a fresh LoRA adapter (adapter_policy: merge), or use DDP",
            )
        self._first_weights = [(p, p.detach().clone()) for p in self.model.parameters() if p.requires_grad]


def _own_dropout(module: nn.Module) -> bool:
    """Whether a module applies dropout without a module of its own: attention in its kernel, OPT's kin in a layer."""
    return any("drop" in name and isinstance(rate, float) and rate > 0 for name, rate in vars(module).items())
