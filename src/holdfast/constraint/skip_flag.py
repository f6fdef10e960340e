"""`found_inf` of torch's fused Adam: where it is 1, the kernels leave parameters, moments and step counts as they are.

The host then need not wait for the task's gradient before it launches the optimizer's step. Fused SGD is left out: its
momentum would begin with whatever lay in memory, were its first step skipped.
"""

import torch
from torch import Tensor

from holdfast.constraint.gradients import ParameterSpace

OWN = "_of_safety_filter"


def set_flag(optimizer: torch.optim.Optimizer, space: ParameterSpace, lost: Tensor) -> bool:
    """Let the optimizer's kernels skip the next step where `lost` is 1; returns whether they do.

    Groups are asked one by one, since a loaded state brings its own `fused`, and other kernels refuse the flag. A flag
    that is there already is a gradient scaler's, and stays.
    """
    clear_flag(optimizer)  # left by a step that raised
    adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    fused = adam and all(group.get("fused") for group in optimizer.param_groups)
    if not fused or space.sharded or hasattr(optimizer, "found_inf"):
        return False
    setattr(lost, OWN, True)
    optimizer.found_inf = lost  # type: ignore[attr-defined]
    return True


def clear_flag(optimizer: torch.optim.Optimizer) -> None:
    """Take back the flag of a safety filter; no other."""
    if hasattr(getattr(optimizer, "found_inf", None), OWN):
        del optimizer.found_inf  # type: ignore[attr-defined]
