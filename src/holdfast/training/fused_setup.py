"""Whether a run's steps can be fused, and the pass that fuses them: built at the first step, tried on a few rows."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import Trainer

from holdfast.core.errors import UnsupportedError
from holdfast.core.ranks import gather_objects
from holdfast.core.units import KL_UNITS
from holdfast.data.encode import Encoded
from holdfast.fused.body import Body, EagerPasses
from holdfast.fused.grouped_lora import GroupedAdapter
from holdfast.fused.joint_pass import JointPass
from holdfast.fused.packed_rows import encoded_rows, scored
from holdfast.fused.probe import packing_problem, probe_rows
from holdfast.fused.recorded import RecordedPasses
from holdfast.fused.support import batch_dependent, other_mixers, plain_layers
from holdfast.scoring.head import causal_lm
from holdfast.scoring.reference_states import ReferenceStates
from holdfast.training.hooks import Defense

if TYPE_CHECKING:
    from holdfast.training.config import SafetyArguments
    from holdfast.training.run import Run
    from holdfast.training.trainer import SafeTrainer

logger = logging.getLogger(__name__)

BATCH = frozenset({"input_ids", "attention_mask", "labels"})
LIMIT = 2 * 2**30  # bytes of host memory
PASS_TOKENS = 4096  # at one time on the device
PROBED = 64  # task rows among which those are chosen that packing is tried on


def joint_pass(run: Run) -> JointPass | str:
    """The pass for this model, tried on a few rows; or why there is none, on any process."""
    body = why_not(run) or _body(run)
    reason = body if isinstance(body, str) else _untrue(run, body)
    reasons = [one for one in gather_objects(reason or "") if one]
    if reasons or isinstance(body, str):
        return str(reasons[0])
    recorded = _records(run, body)
    what = "one pass a step for both gradients" if run.defense.joint_terms else "packed task rows"
    logger.info("%s%s", what, ", recorded as CUDA graphs" if recorded else "")
    passes = RecordedPasses(body) if recorded else EagerPasses(body)
    return JointPass(passes, _kept_states(run, body))


def why_not(run: Run) -> str | None:
    """Why this run's task loss is not the plain mean over its scored tokens, padded batch by padded batch."""
    args, trainer, defense = run.args, run.trainer, run.defense
    if not defense.packed(run.progress.stage):
        return f"defense {defense.name!r} changes the loss or the model's layers"
    other = sorted(BATCH ^ set(trainer.batch_keys))
    joined = any(getattr(args, name, False) for name in ("packing", "padding_free"))
    for what, present in (
        ("FSDP shards the model", trainer.is_fsdp_enabled),
        ("DeepSpeed's hooks take every backward pass for the task's", trainer.is_deepspeed_enabled),
        ("packing or padding_free joins task rows already", joined),
        (str(run.other_loss()), run.other_loss() is not None),
        ("NEFTune adds noise to the embeddings", getattr(args, "neftune_noise_alpha", None) is not None),
        ("activation offloading", bool(getattr(args, "activation_offloading", False))),
        ("Liger kernels", bool(getattr(args, "use_liger_kernel", False))),
        (f"batches have more or less than {', '.join(sorted(BATCH))}: {', '.join(other)}", bool(other)),
    ):
        if present:
            return what
    return _own_step(trainer) or _own_loss(defense)


def _own_step(trainer: SafeTrainer) -> str | None:
    """A loss, or a step below ours, that is not TRL's: the fused step would go past it."""
    from holdfast.training.trainer import SafeSFTTrainer

    for name in ("compute_loss", "training_step"):
        if name in vars(trainer):
            return f"the trainer's {name} is replaced"
    for cls in type(trainer).__mro__:
        if cls in SafeSFTTrainer.__mro__:
            continue
        above = issubclass(cls, SafeSFTTrainer)  # a step above calls ours
        known = {"compute_loss": SafeSFTTrainer if above else Trainer, "training_step": cls if above else Trainer}
        for name, owner in known.items():
            if getattr(cls, name, None) not in (None, getattr(owner, name)):
                return f"{cls.__name__} has its own {name}"
    return None


def _own_loss(defense: Defense) -> str | None:
    """A loss that the fused step would go past: it asks neither `task_loss` nor `extra_loss`."""
    for name in ("task_loss", "extra_loss"):
        loss = getattr(type(defense), name)
        if loss is not getattr(Defense, name) and not getattr(loss, "two_pass_only", False):
            return f"defense {defense.name!r} has its own {name}"
    return None


def longest_row(args: SafetyArguments) -> int | None:
    """A bound on the tokens of a row, where there is one."""
    return None if (args.dataset_kwargs or {}).get("skip_prepare_dataset") else args.max_length


def _body(run: Run) -> Body | str:
    layers = plain_layers(run.model)
    if isinstance(layers, str):
        return layers
    mixers = other_mixers(run.model)
    if isinstance(mixers, str):
        return mixers
    adapter = GroupedAdapter(layers, 1 + (len(run.data.safety) if run.defense.joint_terms else 0))
    return Body(run.model, adapter, mixers, device=run.args.device, precision=run.trainer.accelerator.autocast)


def _untrue(run: Run, body: Body) -> str | None:
    """What a trial on a few rows finds: packed rows whose states are not those of padded ones."""
    run.model.train()  # as steps will find it: layers are checkpointed in training mode alone
    config, longest = causal_lm(run.model).config.get_text_config(), longest_row(run.args)
    rows = [e for one in run.data.safety.values() for e in one.constraint_set]
    if not rows:
        first = itertools.islice((tuple(row["input_ids"]) for row in run.data.task), PROBED)
        rows = [Encoded(f"task {i}", ids, ids, False) for i, ids in enumerate(first)]
    return batch_dependent(config, longest) or packing_problem(
        EagerPasses(body), probe_rows(rows, config, longest), run.data.tokenizer.pad_token_id
    )


def _kept_states(run: Run, body: Body) -> ReferenceStates | None:
    """The reference's states of sets whose unit is a KL: the run's, or where there is room and every row comes up."""
    if not run.defense.joint_terms:
        return None
    if run.theta_0.kept is not None:
        return run.theta_0.kept.states
    sets = {name: one for name, one in run.data.safety.items() if one.constraint.unit in KL_UNITS}
    examples = [e for one in sets.values() for e in one.steering_rows]
    draws = {name: len(run.data.safety_batch(name)) * run.progress.total_steps for name in sets}
    rare = any(draws[name] < len(one.constraint_set) for name, one in sets.items())
    if not examples or rare or not fits(examples, body.width, body.dtype):
        return None
    return with_adapter_off(EagerPasses(body), examples, run.args.device)


def _records(run: Run, body: Body) -> bool:
    """Whether kernels are recorded: on a GPU, and not where checkpointing would have to replay dropout."""
    wanted, on_gpu, problem = run.args.step_graphs, run.args.device.type == "cuda", ""
    if wanted == "off":
        return False
    if not on_gpu:
        problem = "CUDA graphs need a GPU"
    elif body.checkpointed and body.adapter.dropout > 0:
        problem = "gradient checkpointing with lora_dropout draws the same masks twice, which cannot be recorded"
    if problem and wanted == "on":
        raise UnsupportedError(f"step_graphs: on is not possible: {problem}", remedy="set step_graphs: auto or off")
    if problem and on_gpu:
        logger.warning("the step runs without CUDA graphs: %s", problem)
    return not problem


def with_adapter_off(passes: EagerPasses, examples: Sequence[Encoded], device: torch.device) -> ReferenceStates:
    """Pass over all examples with the adapter off, at most `PASS_TOKENS` tokens or one example at a time."""
    batches: list[list[Encoded]] = []
    held = PASS_TOKENS + 1
    for example in sorted({e.id: e for e in examples}.values(), key=lambda e: (len(e.input_ids), e.id)):
        held += len(example.input_ids)
        if held > PASS_TOKENS:
            batches.append([])
            held = len(example.input_ids)
        batches[-1].append(example)

    def states(batch: Sequence[Encoded]) -> Tensor:
        rows = [encoded_rows(batch)]
        return passes.states(rows, adapters=False).index_select(0, scored(rows)[0].at.to(device))

    return ReferenceStates.of(batches, states, device)


def fits(examples: Sequence[Encoded], width: int, dtype: torch.dtype) -> bool:
    """Whether the states of all examples stay within `LIMIT`."""
    tokens = sum({example.id: example.n_labels for example in examples}.values())
    return tokens * width * dtype.itemsize <= LIMIT
