"""At rate 0 the filter is TorchJD's projection of the task gradient onto the dual cone of both gradients.

DualProj with preference (1, 0) returns the direction nearest to grad f that has a non-negative inner product
with both gradients. The filter only asks for it with grad g, but f + lambda g with <f + lambda g, g> = 0 has
it with grad f too, by Cauchy-Schwarz.
"""

import cvxpy as cp
import numpy as np
import pytest
import torch
from torch import Tensor
from torchjd.aggregation import DualProj
from torchjd.linalg import DualConeProjector, QuadprogProjector

from holdfast.constraint.barrier import barrier_multiplier

TASK = torch.tensor([1.0, 0.0], dtype=torch.float64)


class ClarabelProjector(DualConeProjector):
    """min v^T G v subject to u <= v, the problem that TorchJD's interface states, without quadprog."""

    def __call__(self, U: Tensor, G: Tensor) -> Tensor:
        factor = np.linalg.cholesky(G.numpy()).T
        v = cp.Variable(len(U))
        problem = cp.Problem(cp.Minimize(cp.sum_squares(factor @ v)), [v >= U.numpy()])  # type: ignore[attr-defined]
        problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-10, tol_gap_rel=1e-10, tol_feas=1e-10)
        return torch.as_tensor(v.value, dtype=G.dtype)


def projector(name: str) -> DualConeProjector:
    if name == "clarabel":
        return ClarabelProjector()
    return QuadprogProjector(norm_eps=0.0, reg_eps=1e-12)


@pytest.mark.parametrize("name", ["clarabel", "quadprog"])
def test_rate_zero_equals_the_dual_cone_projection(name: str) -> None:
    aggregator = DualProj(pref_vector=TASK, projector=projector(name))
    generator = torch.Generator().manual_seed(0)
    active = 0
    for _ in range(60):
        jacobian = torch.randn(2, 6, generator=generator, dtype=torch.float64)
        task, constraint = jacobian
        multiplier = barrier_multiplier(
            inner=-float(constraint @ task), value=-0.05, norm_sq=float(constraint @ constraint), rate=0.0
        )
        ours, theirs = task + multiplier * constraint, aggregator(jacobian)
        assert torch.linalg.norm(ours - theirs) <= 1e-4 * torch.linalg.norm(theirs)
        active += multiplier > 0
    assert 15 < active < 45  # both branches were exercised
