"""The metric in which the filter's correction is the smallest one.

The corrected step minimises `1/2 (s - s_nom)^T M^-1 (s - s_nom)`. Three choices of the diagonal `M`:

* identity: the correction is parallel to the constraint's gradient;
* Adam: `M = lr / (sqrt(max(v_task, v_safe)) + eps)`, the preconditioner of the optimizer, covering the second
  moments of both gradients. With the task's moment alone, coordinates that the task never touches (LoRA's A while
  B is zero) would get `lr / eps` and blow up. It depends on the scale of g;
* Adam with unit gradients: v_safe is the second moment of `h / norm(h)`, scaled to the sum of v_task. The correction
  then depends neither on the scale of g nor on how often a constraint is given.
"""

from typing import Any

import torch
from torch import Tensor

from holdfast.constraint.gradients import ParameterSpace, Vector, shard
from holdfast.core.errors import ConfigError

METRICS = ("auto", "identity", "adam", "adam_unit")
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


def resolve_metric(metric: str, optimizer: torch.optim.Optimizer) -> str:
    """`auto` becomes `adam` where the optimizer has second moments, else `identity`; Adam's without them is refused."""
    moments = has_second_moments(optimizer)
    if metric == "auto":
        return "adam" if moments else "identity"
    if metric != "identity" and not moments:
        raise ConfigError(
            f"metric {metric!r} needs an optimizer with elementwise second moments; {type(optimizer).__name__} has "
            "none",
            remedy="set metric to 'identity' or 'auto', or train with AdamW",
        )
    return metric


def _steps(states: list[dict[str, Any]]) -> list[float]:
    """Each parameter's count of optimizer steps, zero where there is none; fused optimizers keep it on the device."""
    tensors = {i: s["step"] for i, s in enumerate(states) if isinstance(s.get("step"), Tensor)}
    counts = [0.0 if i in tensors else float(s.get("step", 0.0)) for i, s in enumerate(states)]
    for device in {t.device for t in tensors.values()}:  # one synchronisation a device
        places = [i for i, t in tensors.items() if t.device == device]
        for i, count in zip(places, torch.stack([tensors[i] for i in places]).tolist(), strict=True):
            counts[i] = float(count)
    return counts


def _second_moments(space: ParameterSpace, optimizer: torch.optim.Optimizer) -> Vector:
    """Adam's debiased second moments of the task gradient, joined; zero for a parameter that it never stepped.

    Such a parameter has a safety gradient but no task gradient, and so no optimizer state.
    """
    beta2 = {id(p): float(group["betas"][1]) for group in optimizer.param_groups for p in group["params"]}
    states = [optimizer.state.get(p, {}) for p in space.params]
    moments = [
        shard(state[SECOND_MOMENT]) if SECOND_MOMENT in state else torch.zeros_like(shard(p))
        for p, state in zip(space.params, states, strict=True)
    ]
    bias = [
        1.0 - beta2[id(p)] ** step if step > 0 else 1.0 for p, step in zip(space.params, _steps(states), strict=True)
    ]
    joined = space.join(moments)
    torch._foreach_div_(joined, space.per_parameter(bias))
    return joined


def adam_diagonal(
    space: ParameterSpace, optimizer: torch.optim.Optimizer, safety_moment: Vector, *, unit: bool = False
) -> Vector:
    """The diagonal of M for Adam's metrics, joined, up to a common factor (the filter does not depend on it).

    Args:
        safety_moment: debiased second moment of the constraint's gradient.
        unit: whether that is of unit gradients, to be scaled to the task's.
    """
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    top = max(float(group["lr"]) for group in optimizer.param_groups)
    moments = _second_moments(space, optimizer)
    if unit:
        task, safe = space.means([moments, safety_moment])
        safety_moment = list(torch._foreach_mul(safety_moment, task / safe if task > 0 else 1.0))
    torch._foreach_maximum_(moments, safety_moment)
    torch._foreach_sqrt_(moments)
    (mean,) = space.means([moments])
    groups = [group_of[id(p)] for p in space.params]
    torch._foreach_add_(moments, space.per_parameter([float(g["eps"]) + RELATIVE_FLOOR * mean for g in groups]))
    torch._foreach_reciprocal_(moments)
    torch._foreach_mul_(moments, space.per_parameter([float(g["lr"]) / top if top > 0 else 1.0 for g in groups]))
    return moments
