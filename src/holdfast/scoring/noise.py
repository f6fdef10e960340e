"""The noise floor: how far degradations stray from zero at theta_0, where each is zero by definition.

A second pass with another batch composition (other neighbours, other padding, other kernels) moves each loss a little,
more so in bfloat16. tau must stay well above that, or numerical noise alone would spend the budget alpha.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.seeding import generator
from holdfast.data.encode import Encoded
from holdfast.scoring.forward import Forward

QUANTILE = 0.99
SAMPLE = 256


def noise_floor(
    forward: Forward, examples: Sequence[Encoded], reference: Tensor, constraint: ChanceConstraint, seed: int
) -> float:
    """The 99 % quantile of |D_i| at theta_0 over at most 256 examples, in the constraint's unit."""
    chosen = sorted(generator(seed, "noise floor").permutation(len(examples))[:SAMPLE].tolist())
    found = forward.degradations([examples[i] for i in chosen], reference[chosen], constraint, shuffle=seed)
    return float(torch.quantile(found.abs(), QUANTILE))
