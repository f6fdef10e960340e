"""What a filter may be handed as constraints: scalars with a graph that leads to the trained parameters."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.constraint.gradients import Vector
from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.core.ranks import sum_in_place, world

GRAPH = "compute g from the model with gradients on: outside torch.no_grad() and inference_mode(), without .detach()"


def differentiable(g: Any) -> list[Tensor]:
    """The constraints as a list, each a scalar tensor that requires a gradient.

    A constraint without a graph has no gradient, so that one below zero would pass for a constraint that holds at every
    step: the filter would be switched off in silence.

    Raises:
        ConfigError: saying what was passed.
    """
    constraints: list[Any] = [g] if isinstance(g, Tensor) or not isinstance(g, Iterable) else list(g)
    if not constraints:
        raise ConfigError(
            "SafetyFilter.step was given no constraint: the step would not be filtered",
            remedy="pass g, or call detach() and optimizer.step() for a step without a filter",
        )
    for i, constraint in enumerate(constraints):
        name = _name(i, len(constraints))
        if not isinstance(constraint, Tensor):
            raise ConfigError(
                f"{name} is a {type(constraint).__name__}, expected a scalar tensor with a gradient",
                remedy=f"do not call float() or .item() on it; {GRAPH}",
            )
        if constraint.dim() != 0:
            raise ConfigError(
                f"{name} is a tensor of shape {tuple(constraint.shape)}, expected a scalar",
                remedy="reduce it first, for example with .mean(); pass several constraints as a list of scalars",
            )
        if not constraint.requires_grad:
            raise ConfigError(
                f"{name} has no graph, so it cannot be differentiated: the filter would be off", remedy=GRAPH
            )
    return constraints


def measured_constraints(g: Any, params: Sequence[Tensor]) -> tuple[list[float], list[Vector]]:
    """Each constraint's value and its gradient by the parameters, averaged over the processes.

    Raises:
        ConfigError: as `differentiable`, or a constraint depends on no trained parameter.
        UnsupportedError: the parameters are sharded.
    """
    constraints = differentiable(g)
    if any(isinstance(p, DTensor) for p in params):
        raise UnsupportedError(
            "SafetyFilter.step on sharded (FSDP2) parameters: their gradients exist only inside backward()",
            remedy="use SafeSFTTrainer, or measure the gradients yourself and call arm() before optimizer.step()",
        )
    gradients: list[Vector] = []
    for i, constraint in enumerate(constraints):
        found = torch.autograd.grad(constraint, params, retain_graph=i + 1 < len(constraints), allow_unused=True)
        require_dependence(found, i)
        gradients.append([torch.zeros_like(p) if x is None else x for p, x in zip(params, found, strict=True)])
    values = [float(c.detach()) for c in constraints]
    # autograd.grad goes past DDP's reduction; every rank must filter with the same numbers
    return _averaged(values, gradients) if world() > 1 else (values, gradients)


def _averaged(values: list[float], gradients: list[Vector]) -> tuple[list[float], list[Vector]]:
    """Means over the ranks: the constraint of the whole batch, for equally large parts."""
    numbers = torch.tensor(values, dtype=torch.float64, device=gradients[0][0].device)
    sum_in_place([numbers, *(x for gradient in gradients for x in gradient)])
    for gradient in gradients:
        for x in gradient:
            x.div_(world())
    return [float(v) for v in (numbers / world()).tolist()], gradients


def require_dependence(gradient: Sequence[torch.Tensor | None], position: int) -> None:
    """Refuse a constraint that depends on none of the optimizer's parameters.

    Args:
        gradient: by parameter, None where the graph does not reach it.
        position: of the constraint among those passed.
    """
    if all(x is None for x in gradient):
        raise ConfigError(
            f"constraint {position + 1} depends on none of the optimizer's parameters: the filter would be off",
            remedy=f"{GRAPH}; give SafetyFilter the optimizer of the model that g is computed from",
        )


def _name(position: int, count: int) -> str:
    return "the constraint g" if count == 1 else f"constraint {position + 1} of {count}"


def nonfinite(what: str, of_each: Iterable[tuple[float, ...]]) -> str:
    """The first constraint of which a number is not finite, in words; empty where there is none."""
    bad = (k for k, numbers in enumerate(of_each, start=1) if not all(map(math.isfinite, numbers)))
    return next((f"{what} of constraint {k}" for k in bad), "")


def one_learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """The learning rate that all parameters share: Algorithm 1 divides the barrier's rate by it."""
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    if len(rates) > 1:
        raise ConfigError(
            f"gradient space needs one learning rate, the optimizer has {len(rates)}",
            remedy="use space 'update', which works with any optimizer, or one learning rate",
        )
    return rates.pop()
