"""The metric in which the filter's correction is the smallest one.

The corrected step minimises `1/2 (s - s_nom)^T M^-1 (s - s_nom)`. Two choices of the diagonal `M`:

* identity: the correction is parallel to the constraint's gradient;
* Adam: `M = lr / (sqrt(max(v_task, v_safe)) + eps)`, the preconditioner of the optimizer, covering the second
  moments of both gradients. With the task's moment alone, coordinates that the task never touches (LoRA's A while
  B is zero) would get `lr / eps` and blow up.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from holdfast.constraint.gradients import ParameterSpace, Vector, shard
from holdfast.core.errors import ConfigError

Metric = Literal["auto", "identity", "adam"]
METRICS = ("auto", "identity", "adam")
SECOND_MOMENT = "exp_avg_sq"
RELATIVE_FLOOR = 1e-3  # of the mean denominator: keeps coordinates that neither gradient visits from dominating


def has_second_moments(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer keeps Adam's elementwise second moment in full precision.

    Decided before the first step from the group's `betas` and, once state exists, from the state itself: Lion has
    betas but no second moment, and 8-bit optimizers store it quantised under another name.
    """
    states = [s for s in optimizer.state.values() if isinstance(s, dict) and s]
    if states:
        return all(SECOND_MOMENT in state for state in states)
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW | torch.optim.NAdam | torch.optim.RAdam)


def resolve_metric(metric: str, optimizer: torch.optim.Optimizer) -> Literal["identity", "adam"]:
    """`auto` becomes `adam` where the optimizer has second moments, else `identity`; `adam` without them is refused."""
    moments = has_second_moments(optimizer)
    if metric == "adam" and not moments:
        raise ConfigError(
            f"metric 'adam' needs an optimizer with elementwise second moments; {type(optimizer).__name__} has none",
            remedy="set metric to 'identity' or 'auto', or train with AdamW",
        )
    return "adam" if metric != "identity" and moments else "identity"


def _debiased(state: dict[str, Any], beta2: float) -> Tensor:
    step = float(state["step"]) if "step" in state else 0.0
    return shard(state[SECOND_MOMENT]) / (1.0 - beta2**step) if step > 0 else shard(state[SECOND_MOMENT])


def adam_diagonal(space: ParameterSpace, optimizer: torch.optim.Optimizer, safety_moment: Vector) -> Vector:
    """The diagonal of M for the Adam metric, up to a common factor (the filter does not depend on it).

    Args:
        safety_moment: debiased second moment of the constraint's gradient.
    """
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    top = max(float(group["lr"]) for group in optimizer.param_groups)
    denominators: Vector = []
    for p, v_safe in zip(space.params, safety_moment, strict=True):
        state = optimizer.state.get(p, {})
        beta2 = float(group_of[id(p)]["betas"][1])
        # A parameter with a safety gradient but no task gradient has no optimizer state: its task moment is zero.
        v = torch.maximum(_debiased(state, beta2), v_safe) if SECOND_MOMENT in state else v_safe
        denominators.append(v.sqrt())
    ones = [torch.ones_like(d) for d in denominators]
    total, count = space.dots([(denominators, ones), (ones, ones)])
    diagonal: Vector = []
    for p, denominator in zip(space.params, denominators, strict=True):
        group = group_of[id(p)]
        relative_lr = float(group["lr"]) / top if top > 0 else 1.0
        diagonal.append(relative_lr / (denominator + float(group["eps"]) + RELATIVE_FLOOR * total / count))
    return diagonal
