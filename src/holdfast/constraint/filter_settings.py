"""What a filter may be asked for: ranges of its settings, and optimizers whose step it can correct."""

import torch

from holdfast.constraint.metric import METRICS
from holdfast.core.errors import ConfigError, UnsupportedError


def check_settings(rate: float, space: str, metric: str, trust_region: float, decay: float) -> None:
    """Refuse settings out of range."""
    if not 0.0 < rate <= 1.0:
        raise ConfigError(
            f"filter rate is {rate}, expected 0 < rate <= 1", remedy="0.3 is a good start; 1 is the paper's"
        )
    if space not in ("update", "gradient"):
        raise ConfigError(f"unknown filter space {space!r}", remedy="use 'update' or 'gradient'")
    if metric not in METRICS:
        raise ConfigError(f"unknown filter metric {metric!r}", remedy=f"known: {', '.join(METRICS)}")
    if not trust_region > 0.0:
        raise ConfigError(f"trust_region is {trust_region}, expected a positive number", remedy="3 is the default")
    if not 0.0 <= decay < 1.0:
        raise ConfigError(f"decay is {decay}, expected 0 <= decay < 1", remedy="0.9 is the default")


def require_one_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers whose step is not one move of the parameters."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(f"{name}: it evaluates the loss several times within a step", remedy="use AdamW or SGD")
    if hasattr(optimizer, "train") and hasattr(optimizer, "eval"):
        raise UnsupportedError(
            f"{name} keeps a second set of weights (schedule-free): the next step would undo the correction",
            remedy="use AdamW with a learning-rate schedule",
        )
