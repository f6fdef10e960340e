"""Degradation of safety examples against the reference, in the constraint's unit.

| unit        | D_i                                                                   |
|-------------|-----------------------------------------------------------------------|
| `nll_token` | mean NLL per completion token minus the reference's                    |
| `nll_sum`   | summed NLL minus the reference's (the paper's definition)               |
| `nll_first` | mean NLL of the first k completion tokens minus the reference's         |
| `kl_token`  | mean token KL from the reference to the model; the reference's is zero  |
| `kl_first`  | mean token KL over the first k completion tokens                         |
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.library_types import LanguageModel
from holdfast.core.units import FIRST_UNITS, KL_UNITS
from holdfast.scoring.completion import CompletionLosses, States, completion_kl, completion_losses


def in_unit(losses: CompletionLosses, constraint: ChanceConstraint) -> Tensor:
    """Per-example NLL, or KL, in the constraint's unit."""
    if constraint.unit == "nll_sum":
        return losses.total
    return losses.per_first_token() if constraint.unit in FIRST_UNITS else losses.per_token()


def degradation(
    model: LanguageModel, batch: Mapping[str, Tensor], reference: Tensor, constraint: ChanceConstraint,
    states: States | None = None,
) -> Tensor:  # fmt: skip
    """`D_i` of every row, differentiable.

    `reference` are their losses at theta_0. A KL looks at their `states` there instead; None: with the adapters off.
    """
    if constraint.unit in KL_UNITS:
        return in_unit(completion_kl(model, batch, constraint.first_k, states), constraint)
    losses = completion_losses(model, batch, constraint.first_k)
    return in_unit(losses, constraint) - reference.to(losses.total)


def slope(weight: Callable[[Tensor], Tensor], degradations: Tensor) -> Tensor:
    """`d weight(D)_i / d D_i`; zero where a row's term is flat, and with it the row's gradient."""
    with torch.enable_grad():
        d = degradations.detach().requires_grad_()
        terms = weight(d)
        return torch.autograd.grad(terms.sum(), d)[0] if terms.requires_grad else torch.zeros_like(d)
