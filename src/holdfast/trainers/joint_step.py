"""A training step in which the task's rows and the constraints' go through the model together (`holdfast.fused`).

The pass runs on the unwrapped module and both gradients are reduced here: the task's to the mean over processes, as DDP
does, the constraints' to the sum.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.constraint.completion import causal_lm
from holdfast.constraint.gradients import ParameterSpace, Vector
from holdfast.core.errors import UnsupportedError
from holdfast.core.ranks import gather_objects, gather_rows, rank, sum_in_place, world
from holdfast.data import streams
from holdfast.data.encode import Encoded
from holdfast.fused.body import Body, EagerPasses
from holdfast.fused.grouped_lora import GroupedAdapter
from holdfast.fused.joint_pass import Found, JointPass, Term
from holdfast.fused.packed_rows import Row, padded_rows
from holdfast.fused.probe import probe_rows, strange
from holdfast.fused.recorded import RecordedPasses
from holdfast.fused.reference_states import ReferenceStates, fits
from holdfast.fused.support import batch_dependent, other_mixers, plain_layers
from holdfast.trainers.hooks import Defense, Inputs, Items
from holdfast.trainers.joint_support import BATCH, longest_row, reason_against
from holdfast.trainers.safety import SafetySet
from holdfast.trainers.safety_pass import SafetyBatch
from holdfast.trainers.side_pass import TokenMean

logger = logging.getLogger(__name__)

PROBED = 64  # task rows among which those are chosen that packing is tried on
Weights = Mapping[str, Callable[[Tensor], Tensor]]


class JointStep:
    """What the micro-batches of one optimizer step have measured so far."""

    def __init__(self, names: list[str]) -> None:
        self.degradations: dict[str, list[Tensor]] = {name: [] for name in names}
        self.gradients: list[Vector] = []


class JointStepMixin:
    """Runs a defense's micro-batches with its constraints' rows beside them, where the model allows it."""

    # Provided by the trainer this is mixed into.
    args: Any
    model: Any
    optimizer: Any
    accelerator: Any
    processing_class: Any
    is_fsdp_enabled: bool
    safety: dict[str, SafetySet]
    space: Callable[[], ParameterSpace]
    safety_batch: Callable[[str], list[int]]
    last_micro_batch: bool
    total_steps: int
    train_dataset: Any
    defense: Defense
    at_reference: Callable[[], Any]
    _idle_start: bool
    _micro_batch: int
    current_gradient_accumulation_steps: int
    _micro: int
    _metrics: Any
    _total_train_tokens: int

    batch_keys: frozenset[str] = BATCH
    """What the batch in progress holds."""
    _joint: JointPass | None = None
    _joint_decided = False
    _joint_step: JointStep | None = None

    @property
    def joint(self) -> bool:
        """Whether this run's steps are fused; decided, and said, at the first step."""
        if not self._joint_decided:
            self._joint_decided = True
            self._joint = self._make_joint()
        return self._joint is not None

    def _make_joint(self) -> JointPass | None:
        wanted = self.args.step
        if not self.defense.packs:
            if wanted == "fused":
                raise UnsupportedError(
                    f"step: fused with defense {self.defense.name!r}, which changes the loss or the model's layers",
                    remedy="set step: auto or two_pass",
                )
            return None
        if wanted == "two_pass" or (wanted == "auto" and self.args.device.type != "cuda"):
            return None
        found = self._engine()
        if isinstance(found, JointPass):
            return found
        if wanted == "fused":
            raise UnsupportedError(f"step: fused is not possible: {found}", remedy="set step: auto or two_pass")
        if rank() == 0 and self.defense.joint_terms:
            logger.warning("two passes a step instead of one: %s", found)
        elif rank() == 0:
            logger.info("task rows are padded and launched kernel by kernel: %s", found)
        return None

    def _engine(self) -> JointPass | str:
        """The pass for this model, tried on a few rows; or why there is none, on any process."""
        body: Body | None = None
        found = reason_against(self) or self._body()
        if isinstance(found, Body):
            body, found = found, ""
            config = causal_lm(self.model).config.get_text_config()
            longest = longest_row(self.args)
            found = batch_dependent(config, longest) or strange(
                EagerPasses(body), probe_rows(self._examples(), config, longest), self.processing_class.pad_token_id
            ) or ""  # fmt: skip
        reasons = [reason for reason in gather_objects(found) if reason]
        if reasons or body is None:
            return str(reasons[0])
        recorded = self._records(body)
        what = "one pass a step for both gradients" if self.defense.joint_terms else "packed task rows"
        logger.info("%s%s", what, ", recorded as CUDA graphs" if recorded else "")
        passes = RecordedPasses(body) if recorded else EagerPasses(body)
        return JointPass(self.model, passes, self.args.device, self._kept_states(body))

    def _examples(self) -> list[Encoded]:
        """Rows on which packing is tried: of the safety sets, or the first of the task."""
        found = [e for one in self.safety.values() for e in one.constraint_set]
        if found:
            return found
        rows = itertools.islice((tuple(row["input_ids"]) for row in self.train_dataset), PROBED)
        return [Encoded(f"task {i}", ids, ids, False) for i, ids in enumerate(rows)]

    def _kept_states(self, body: Body) -> ReferenceStates | None:
        """The reference's states of kl_token sets, where there is room and every row comes up."""
        if not self.defense.joint_terms:
            return None
        sets = {name: one for name, one in self.safety.items() if one.constraint.unit == "kl_token"}
        examples = [e for one in sets.values() for e in one.constraint_set]
        drawn = all(
            len(self.safety_batch(name)) * self.total_steps >= len(one.constraint_set) for name, one in sets.items()
        )
        if not examples or not drawn or not fits(examples, body.width, body.dtype):
            return None
        return ReferenceStates.of(EagerPasses(body), examples, self.args.device)

    def _body(self) -> Body | str:
        layers = plain_layers(self.model)
        if isinstance(layers, str):
            return layers
        mixers = other_mixers(self.model)
        if isinstance(mixers, str):
            return mixers
        adapter = GroupedAdapter(layers, 1 + (len(self.safety) if self.defense.joint_terms else 0))
        return Body(self.model, adapter, mixers, device=self.args.device, precision=self.accelerator.autocast)

    def _records(self, body: Body) -> bool:
        """Whether kernels are recorded: on a GPU, and not where checkpointing would have to replay dropout."""
        wanted = self.args.step_graphs
        if wanted == "off":
            return False
        problem = None
        if self.args.device.type != "cuda":
            problem = "CUDA graphs need a GPU"
        elif body.checkpointed and body.adapter.dropout > 0:
            problem = "gradient checkpointing with lora_dropout draws the same masks twice, which cannot be recorded"
        if problem is not None and wanted == "on":
            raise UnsupportedError(f"step_graphs: on is not possible: {problem}", remedy="set step_graphs: auto or off")
        if problem is not None and self.args.device.type == "cuda":
            logger.warning("the step runs without CUDA graphs: %s", problem)
        return problem is None

    # -- a side pass -------------------------------------------------------------------------------------------------

    def packed_side_gradient(self, rows: Sequence[Encoded], loss: TokenMean) -> tuple[Tensor, Vector]:
        """As `side_pass.side_gradient`, over packed rows."""
        assert self._joint is not None
        mine = streams.shard(range(len(rows)), rank(), world())
        values: list[Tensor] = []
        total: list[Vector] = []
        for i in range(0, len(mine), self._micro_batch):
            part = [rows[j] for j in mine[i : i + self._micro_batch]]
            states = None if loss.reference is None else self._states_at_reference(part)
            found, gradient = self._joint.side(part, 1.0 / loss.total, states)
            values.append(found)
            total = _sum(total, [_copied(gradient)])
        sum_in_place(total[0])
        by_id = {id(p): g for p, g in zip(self._adapted(), total[0], strict=True)}
        losses = gather_rows(torch.cat(values)).double().cpu()
        return losses, [by_id[id(p)] for p in self.space().params]

    def _states_at_reference(self, rows: Sequence[Encoded]) -> Tensor:
        """Hidden states of the rows' completions at theta_0."""
        assert self._joint is not None
        if self._idle_start:
            return self._joint.completion_states(rows, adapters=False)
        with self.at_reference():
            return self._joint.completion_states(rows, adapters=True)

    # -- one micro-batch ---------------------------------------------------------------------------------------------

    def joint_micro_step(self, inputs: Inputs, items: Items, weights: Weights, *, screen: bool = False) -> Tensor:
        """Accumulate the gradients of one micro-batch and of its part of the safety batches; the detached loss."""
        assert self._joint is not None
        if not self._joint.passes.body.training:
            self.model.train()
        if self._joint_step is None or self._micro == 0:
            self._joint_step = JointStep(list(weights))
        batch = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        task = padded_rows(batch)
        scored = sum(int((row[1][1:] != -100).sum()) for row in task)
        scale = self._scale(scored, items)
        terms = {name: self._term(name, weight) for name, weight in weights.items()}
        found = self._joint.run(task, scale, terms, screen=screen)
        before = self._joint_step.gradients
        self._accumulate(found)
        self._log_tokens(found, task, scored)
        if not math.isfinite(float(found.loss)) and any(term.rows for term in terms.values()):
            # Weight gradients are sums over all tokens, and such a number times zero is not zero. The step is
            # discarded; what is remembered of the constraints is not.
            apart = self._joint.run([], scale, terms)
            self._joint_step.gradients = _sum(before, [_copied(vector) for vector in apart.gradients[1:]])
        if self.last_micro_batch:
            self._reduce()
        return found.loss

    def _scale(self, scored: int, items: Items) -> Tensor:
        """What the sum of token losses is multiplied by: TRL's division, and the Trainer's for accumulation."""
        device = self.args.device
        if items is None:
            mean = torch.tensor(1.0 / max(scored, 1), device=device)
            return mean / self._divisor(items)  # type: ignore[attr-defined,no-any-return]
        processes = world() if self.args.average_tokens_across_devices else 1
        scale: Tensor = processes / torch.as_tensor(items, device=device).clamp(min=1).float()
        return scale / self._divisor(items)  # type: ignore[attr-defined,no-any-return]

    def _term(self, name: str, weight: Callable[[Tensor], Tensor]) -> Term:
        one, positions = self.safety[name], self.safety_batch(name)
        mine = streams.shard(positions, rank(), world())
        micros = self.current_gradient_accumulation_steps
        at = mine[len(mine) * self._micro // micros : len(mine) * (self._micro + 1) // micros]
        return Term(
            [one.constraint_set[i] for i in at], one.constraint_reference[at], one.constraint, weight, len(positions)
        )

    def _accumulate(self, found: Found) -> None:
        step = self._joint_step
        assert step is not None
        task, *sides = (_copied(vector) for vector in found.gradients)
        parameters = self._adapted()
        if all(p.grad is None for p in parameters):
            for p, g in zip(parameters, task, strict=True):
                p.grad = g
        else:
            torch._foreach_add_([p.grad for p in parameters], task)
        step.gradients = _sum(step.gradients, sides)
        for name, d in found.degradations.items():
            step.degradations[name].append(d)

    def _adapted(self) -> list[Any]:
        """The parameters of which a pass gives gradients, in its order."""
        assert self._joint is not None
        return list(self._joint.passes.body.adapter.parameters)

    def _log_tokens(self, found: Found, task: list[Row], scored: int) -> None:
        """What TRL logs of the task's tokens."""
        counts = torch.tensor([scored, sum(len(ids) for ids, _ in task)], dtype=torch.float64, device=found.loss.device)
        own = torch.cat([torch.stack([found.entropy.double(), found.correct.double()]), counts])
        entropy, correct, valid, tokens = gather_rows(own[None]).sum(0).tolist()
        metrics = self._metrics["train"]
        metrics["entropy"].append(entropy / valid if valid else 0.0)
        metrics["mean_token_accuracy"].append(correct / valid if valid else 0.0)
        self._total_train_tokens += int(tokens)
        metrics["num_tokens"] = [self._total_train_tokens]

    def _reduce(self) -> None:
        """Over the processes: the mean of the task's gradients, the sum of the constraints'."""
        step = self._joint_step
        if world() == 1 or step is None:
            return
        own = [p.grad for p in self._adapted() if p.grad is not None]
        sum_in_place([*own, *(g for vector in step.gradients for g in vector)])
        torch._foreach_div_(own, float(world()))

    def joint_result(self, name: str) -> tuple[SafetyBatch, Vector] | None:
        """This step's safety batch and its gradient, where the step was fused."""
        step = self._joint_step
        if step is None or self._joint is None or name not in step.degradations:
            return None
        place = list(step.degradations).index(name)
        by_id = {id(p): g for p, g in zip(self._adapted(), step.gradients[place], strict=True)}
        degradations = gather_rows(torch.cat(step.degradations[name])).double().cpu()
        batch = SafetyBatch(torch.tensor(self.safety_batch(name)), degradations)
        return batch, [by_id[id(p)] for p in self.space().params]


def _copied(vector: Vector) -> Vector:
    """A copy in a few kernels: a recording's results are overwritten by its next run."""
    return list(torch._foreach_mul(vector, 1.0))


def _sum(totals: list[Vector], vectors: list[Vector]) -> list[Vector]:
    """Each constraint's gradient so far and its part from one more micro-batch, in new tensors."""
    if not totals:
        return vectors
    return [list(torch._foreach_add(total, vector)) for total, vector in zip(totals, vectors, strict=True)]
