"""A training step in which the task's rows and the constraints' go through the model together (`holdfast.fused`).

The pass runs on the unwrapped module and both gradients are reduced here: the task's to the mean over processes, as DDP
does, the constraints' to the sum.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.constraint.gradients import ParameterSpace, Vector
from holdfast.core.ranks import gather_rows, rank, sum_in_place, world
from holdfast.data import streams
from holdfast.data.encode import Encoded
from holdfast.fused.joint_pass import Found, JointPass, Term
from holdfast.fused.packed_rows import Row, padded_rows
from holdfast.trainers.hooks import Inputs, Items
from holdfast.trainers.joint_engine import make_joint
from holdfast.trainers.joint_support import BATCH
from holdfast.trainers.safety import SafetySet
from holdfast.trainers.safety_pass import SafetyBatch
from holdfast.trainers.side_pass import TokenMean

logger = logging.getLogger(__name__)

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
    safety: dict[str, SafetySet]
    space: Callable[[], ParameterSpace]
    safety_batch: Callable[[str], list[int]]
    last_micro_batch: bool
    at_reference: Callable[[], Any]
    _idle_start: bool
    _micro_batch: int
    current_gradient_accumulation_steps: int
    _micro: int
    _metrics: Any
    _total_train_tokens: int
    state: Any
    padded_step: Callable[[], Tensor]
    """The Trainer's own step on the micro-batch in progress."""

    batch_keys: frozenset[str] = BATCH
    """What the batch in progress holds."""
    step_declined: str | None = None
    """Why this model or these settings do not allow fused steps; None where they do, or none were asked for."""
    _joint: JointPass | None = None
    _joint_decided = False
    _joint_step: JointStep | None = None

    @property
    def joint(self) -> bool:
        """Whether this run's steps are fused; decided, and said, at the first step."""
        if not self._joint_decided:
            self._joint_decided = True
            self._joint = make_joint(self)
        return self._joint is not None

    @property
    def step_path(self) -> str | None:
        """How steps were computed: `two_pass`, `fused` or `fused, recorded`; None before the first."""
        if not self._joint_decided:
            return None
        if self._joint is None:
            return "two_pass"
        return "fused, recorded" if getattr(self._joint.passes, "recording", False) else "fused"

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

    def joint_micro_step(self, inputs: Inputs, items: Items, weights: Weights, *, skip: bool = False) -> Tensor:
        """Accumulate the gradients of one micro-batch and of its part of the safety batches; the detached loss.

        One pass holds what the backward needs of both batches. Where that does not fit and the path was ours to choose,
        this step and all later ones take two passes: nothing of the failed micro-batch has been accumulated, the task's
        gradient of earlier ones is kept, and the safety batch is passed over as a whole when the step ends.
        """
        try:
            return self._joint_micro_step(inputs, items, weights, skip=skip)
        except torch.OutOfMemoryError:
            if self.args.step != "auto" or world() > 1:  # processes must not part ways
                raise
        self._leave_joint()  # here, where the exception no longer holds the pass's tensors
        return self.padded_step()

    def _leave_joint(self) -> None:
        """Two passes from now on; what recordings held is given back."""
        step = int(self.state.global_step) + 1
        self.step_declined = f"out of memory in one pass, at step {step}"
        logger.warning("two passes a step instead of one from step %d on: one pass runs out of memory", step)
        self._joint = self._joint_step = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _joint_micro_step(self, inputs: Inputs, items: Items, weights: Weights, *, skip: bool) -> Tensor:
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
        found = self._joint.run(task, scale, terms, skip=skip)
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
        # Before the task's gradient is touched: what runs out of memory must leave it as it was.
        step.gradients = _sum(step.gradients, sides)
        parameters = self._adapted()
        if all(p.grad is None for p in parameters):
            for p, g in zip(parameters, task, strict=True):
                p.grad = g
        else:
            torch._foreach_add_([p.grad for p in parameters], task)
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
