"""What a filter may be handed as constraints: scalars with a graph that leads to the trained parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.core.errors import ConfigError

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
