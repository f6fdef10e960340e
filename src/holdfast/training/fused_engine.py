"""The fused engine: the task's rows and the constraints' go through the model together (`holdfast.fused`).

The pass runs on the unwrapped module and both gradients are reduced here: the task's to the mean over processes, as DDP
does, the constraints' to the sum. The engine is built at the first step and tried on a few rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdfast.constraint.gradients import Vector
from holdfast.core.ranks import gather_rows, rank, sum_in_place, world
from holdfast.data import streams
from holdfast.data.encode import Encoded
from holdfast.fused.joint_pass import Found, JointPass
from holdfast.fused.joint_pass import Term as JointTerm
from holdfast.fused.packed_rows import Row, padded_rows
from holdfast.models.library_errors import out_of_memory
from holdfast.training.fitting import release
from holdfast.training.hooks import Inputs, Items
from holdfast.training.side_pass import RowLoss, Term, TokenMean
from holdfast.training.step import Measured, StepMeasurement, TwoPassEngine

if TYPE_CHECKING:
    from holdfast.training.run import Run

logger = logging.getLogger(__name__)


class FusedEngine:
    """One pass a step for the task's gradient and every constraint's."""

    fused: bool = True

    def __init__(self, run: Run, joint: JointPass) -> None:
        self.joint = joint
        self._run = run
        self._two_pass = TwoPassEngine(run)  # for what has no packed form
        self._degradations: dict[str, list[Tensor]] = {}
        self._gradients: list[Vector] = []

    @property
    def name(self) -> str:
        return "fused, recorded" if getattr(self.joint.passes, "recording", False) else "fused"

    def accumulate(self, inputs: Inputs, items: Items, terms: Mapping[str, Term], *, skip: bool = False) -> Tensor:
        """Both batches in one pass. Where it runs out of memory under `step: auto`, all later steps take two passes.

        The failed micro-batch has accumulated nothing and is passed over again; the task's gradient of earlier ones is
        kept, and the safety batch is passed over as a whole at the step's end.
        """
        try:
            return self._accumulate(inputs, items, terms, skip=skip)
        except RuntimeError as error:
            if not out_of_memory(error) or self._run.args.step != "auto" or world() > 1:  # processes stay together
                raise
        self._leave()  # here, where the exception no longer holds the pass's tensors
        return self._run.engine.accumulate(inputs, items, terms, skip=skip)

    def _leave(self) -> None:
        """Two passes from now on; what recordings held is given back."""
        run, step = self._run, self._run.progress.step + 1
        run.step_declined = f"out of memory in one pass, at step {step}"
        logger.warning("two passes a step instead of one from step %d on: one pass runs out of memory", step)
        run.engine = self._two_pass
        del self.joint
        self._degradations, self._gradients = {}, []
        release()

    def _accumulate(self, inputs: Inputs, items: Items, terms: Mapping[str, Term], *, skip: bool) -> Tensor:
        run = self._run
        if not self.joint.passes.body.training:
            run.model.train()
        if run.progress.micro == 0:
            self._degradations, self._gradients = {name: [] for name in terms}, []
        task = padded_rows(run.trainer._prepare_inputs(inputs))
        scored = sum(int((row[1][1:] != -100).sum()) for row in task)
        by_rows = run.trainer.by_rows
        counted = sum(bool((row[1][1:] != -100).any()) for row in task) if by_rows else scored
        scale = self._scale(counted, items)
        parts = {name: self._part(name, term) for name, term in terms.items()}
        found = self.joint.run(task, scale, parts, skip=skip, by_rows=by_rows)
        before = self._gradients
        self._add(found)
        numbers, degradations = found.on_host()
        for name, d in degradations.items():
            self._degradations[name].append(d)
        self._log_tokens(numbers, task, scored)
        if world() == 1:
            run.progress.known = found.loss, numbers[0].to(found.loss.dtype)
        if not math.isfinite(float(numbers[0])) and any(part.rows for part in parts.values()):
            # Weight gradients are sums over all tokens, and such a number times zero is not zero. The step is
            # discarded; what is remembered of the constraints is not.
            apart = self.joint.run([], scale, parts)
            self._gradients = _sum(before, [_copied(vector) for vector in apart.gradients[1:]])
        if run.progress.last_micro_batch:
            self._reduce()
        return found.loss

    def _scale(self, counted: int, items: Items) -> Tensor:
        """What the sum of token (or rows' mean) losses is multiplied by: TRL's division, and the Trainer's."""
        args, divisor = self._run.args, int(self._run.trainer.loss_divisor(items))
        if items is None:
            return torch.tensor(1.0 / max(counted, 1), device=args.device) / divisor
        processes = world() if args.average_tokens_across_devices else 1
        return processes / torch.as_tensor(items, device=args.device).clamp(min=1).float() / divisor

    def _part(self, name: str, term: Term) -> JointTerm:
        """This process's rows of the safety batch for this micro-batch."""
        data, progress = self._run.data, self._run.progress
        one, positions, weights = data.safety[name], data.safety_batch(name), data.safety_weights(name)
        mine = streams.shard(range(len(positions)), rank(), world())
        micros = progress.micro_batches
        places = mine[len(mine) * progress.micro // micros : len(mine) * (progress.micro + 1) // micros]
        at, own = [positions[i] for i in places], None if weights is None else weights[places]
        return JointTerm(one.rows(at), one.constraint_reference[at], one.constraint, term, len(positions), own)

    def _add(self, found: Found) -> None:
        task, *sides = (_copied(vector) for vector in found.gradients)
        # Before the task's gradient is touched: what runs out of memory must leave it as it was.
        self._gradients = _sum(self._gradients, sides)
        parameters = self._adapted()
        if all(p.grad is None for p in parameters):
            for p, g in zip(parameters, task, strict=True):
                p.grad = g
        else:
            torch._foreach_add_([p.grad for p in parameters], task)

    def _gathered(self, rows: Tensor) -> Tensor:
        """Rows of all processes, on the CPU."""
        return rows if world() == 1 else gather_rows(rows.to(self._run.args.device)).cpu()

    def _log_tokens(self, numbers: Tensor, task: list[Row], scored: int) -> None:
        """What TRL logs of the task's tokens."""
        counts = torch.tensor([scored, sum(len(ids) for ids, _ in task)], dtype=torch.float64)
        entropy, correct, valid, tokens = self._gathered(torch.cat([numbers[1:], counts])[None]).sum(0).tolist()
        trainer = self._run.trainer
        metrics = trainer._metrics["train"]
        metrics["entropy"].append(entropy / valid if valid else 0.0)
        metrics["mean_token_accuracy"].append(correct / valid if valid else 0.0)
        trainer._total_train_tokens += int(tokens)
        metrics["num_tokens"] = [trainer._total_train_tokens]

    def _adapted(self) -> list[Any]:
        """The parameters of which a pass gives gradients, in its order."""
        return list(self.joint.passes.body.adapter.parameters)

    def _reduce(self) -> None:
        """Over the processes: the mean of the task's gradients, the sum of the constraints'."""
        if world() == 1:
            return
        own = [p.grad for p in self._adapted() if p.grad is not None]
        sum_in_place([*own, *(g for vector in self._gradients for g in vector)])
        torch._foreach_div_(own, float(world()))

    def measure(self, terms: Mapping[str, Term]) -> StepMeasurement:
        """As accumulated; a constraint that no micro-batch was told of is passed over by itself."""
        missing = {name: term for name, term in terms.items() if name not in self._degradations}
        return {
            **{name: self._measured(name) for name in terms if name not in missing},
            **self._two_pass.measure(missing),
        }

    def _measured(self, name: str) -> Measured:
        gradient = self._gradients[list(self._degradations).index(name)]
        degradations = self._gathered(torch.cat(self._degradations[name]))
        return Measured(torch.tensor(self._run.data.safety_batch(name)), degradations, self._ordered(gradient))

    def _ordered(self, gradient: Vector) -> Vector:
        """A gradient in the order of the trainable parameters."""
        by_id = {id(p): g for p, g in zip(self._adapted(), gradient, strict=True)}
        return [by_id[id(p)] for p in self._run.space().params]

    def side_gradient(self, rows: Sequence[Encoded], loss: RowLoss) -> tuple[Tensor, Vector]:
        """Over packed rows where the loss has that form."""
        return self._packed(rows, loss) if isinstance(loss, TokenMean) else self._two_pass.side_gradient(rows, loss)

    def _packed(self, rows: Sequence[Encoded], loss: TokenMean) -> tuple[Tensor, Vector]:
        most = self._run.side_rows
        mine = streams.shard(range(len(rows)), rank(), world())
        values: list[Tensor] = []
        total: list[Vector] = []
        for i in range(0, len(mine), most):
            part = [rows[j] for j in mine[i : i + most]]
            states = None if loss.reference is None else self._states_at_reference(part)
            found, gradient = self.joint.side(part, 1.0 / loss.total, states)
            values.append(found)
            total = _sum(total, [_copied(gradient)])
        sum_in_place(total[0])
        return gather_rows(torch.cat(values)).double().cpu(), self._ordered(total[0])

    def _states_at_reference(self, rows: Sequence[Encoded]) -> Tensor:
        """Hidden states of the rows' completions at theta_0."""
        theta_0 = self._run.theta_0
        if theta_0.idle_adapter:
            return self.joint.completion_states(rows, adapters=False)
        with theta_0.active():
            return self.joint.completion_states(rows, adapters=True)

    def look(self, name: str, places: list[int], most: int) -> Tensor:
        """D_i of these rows of a set as the parameters are now, `most` at a time, without a gradient; on the CPU."""
        one, found = self._run.data.safety[name], []
        for at in (places[i : i + most] for i in range(0, len(places), most)):
            constraint = one.constraint
            term = JointTerm(one.rows(at), one.constraint_reference[at], constraint, constraint.phi, len(at))
            found.append(self.joint.look(term))
        return torch.cat(found).cpu()

    def degradations(self, name: str) -> Tensor:
        return self._two_pass.degradations(name)


def _copied(vector: Vector) -> Vector:
    """A copy in a few kernels: a recording's results are overwritten by its next run."""
    return list(torch._foreach_mul(vector, 1.0))


def _sum(totals: list[Vector], vectors: list[Vector]) -> list[Vector]:
    """Each constraint's gradient so far and its part from one more micro-batch, in new tensors."""
    if not totals:
        return vectors
    return [list(torch._foreach_add(total, vector)) for total, vector in zip(totals, vectors, strict=True)]
