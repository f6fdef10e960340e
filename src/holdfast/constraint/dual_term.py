"""A dual term in the optimizer's own gradient, so that the filter on top of it has less to correct.

The optimizer's gradient becomes

    grad f + sum_k r_k (norm(grad f) / norm(h_k)) h_k,      r_k >= 0,

in which neither the scale of g nor that of the loss matters. r_k follows the sign and size of what the step before
wanted of the correction, its nominal step s against the barrier `h_k . s <= -gamma v_k`:

    r_k <- clip(r_k + dual (h_k . s + gamma v_k) / (|h_k . s| + gamma |v_k|), 0, LARGEST).

At rest the nominal step meets the barrier by itself, or r_k = 0 and there is room. A slack constraint adds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from holdfast.constraint.gradients import ParameterSpace, Vector
from holdfast.constraint.problem import FilterProblem

LARGEST = 10.0  # the task's gradient keeps a tenth


@dataclass
class DualTerm:
    """The running r_k of every constraint; part of a checkpoint."""

    ratios: list[float] = field(default_factory=list)

    def add(self, space: ParameterSpace, gradients: Sequence[Vector], norms: Sequence[float]) -> None:
        """Add the term to `.grad`.

        Args:
            gradients: h_k on this step's batch, joined.
            norms: their squared norms.
        """
        if not any(self.ratios):  # a gradient of zeros would still move parameters that have none
            return
        task = space.task_gradient()
        norm = math.sqrt(space.dots([(task, task)])[0])
        weights = [r * norm / math.sqrt(h) if h > 0.0 else 0.0 for r, h in zip(self.ratios, norms, strict=True)]
        space.add_to_gradient([space.split(h) for h in gradients], weights)

    def follow(self, problem: FilterProblem, dual: float) -> None:
        """Move every r_k by what the nominal step lacks, as a share of its own terms."""
        wanted = problem.inner + problem.target
        size = np.abs(problem.inner) + np.abs(problem.target)
        moves = np.divide(wanted, size, out=np.zeros_like(size), where=size > 0.0)
        before = self.ratios or [0.0] * len(moves)
        moved = [old + dual * float(move) for old, move in zip(before, moves, strict=True)]
        self.ratios = [min(max(ratio, 0.0), LARGEST) for ratio in moved]
