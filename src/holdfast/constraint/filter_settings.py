"""What a filter may be asked for: ranges of its settings, and optimizers whose step it can correct."""

from dataclasses import dataclass
from typing import Literal

import torch

from holdfast.constraint.estimators import make_estimator
from holdfast.constraint.metric import METRICS
from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.defaults import default

Space = Literal["update", "gradient"]


@dataclass(frozen=True, kw_only=True)
class FilterOptions:
    """Settings of the filter and of the estimator.

    Attributes:
        space: what is corrected, `update` (the applied step) or `gradient` (Algorithm 1).
        rate: gamma, the share of the slack one step may use.
        metric: `auto`, `identity`, `adam` or `adam_unit`; update space only.
        trust_region: largest correction in multiples of the nominal step; update space only.
        estimator: `batch`, `ema` or `table`.
        decay: weight of the past in the averages of value and gradient.
        value_decay: the value's own, where it differs; None: `decay`.
        reserve: share of alpha that steering leaves unused: the barrier is at `g <= -reserve alpha`.
        dual: how much the weight of the constraint's gradient in the optimizer's own may change in a step, so that
            fewer steps need a correction; 0 has no such term. Update space only.
        anchor: whether averages follow the distance from theta_0, and a step that would leave the radius at which g is
            predicted at `-reserve alpha / 2` is pulled back towards theta_0. Update space only.
        every: measure the constraints at every such step, and in between go by the averages, which follow the distance
            from theta_0; a step from a tenth further out measures too. Above 1 it needs `anchor` and averages.
    """

    space: Space = default("defense.space")
    rate: float = default("defense.rate")
    metric: str = default("defense.metric")
    trust_region: float = default("defense.trust_region")
    estimator: str = default("defense.estimator")
    decay: float = default("defense.decay")
    value_decay: float | None = default("defense.value_decay")
    reserve: float = default("defense.reserve")
    dual: float = default("defense.dual")
    anchor: bool = default("defense.anchor")
    every: int = default("defense.every")

    def __post_init__(self) -> None:
        """Refuse values out of range where they are written, not when training begins."""
        for decay in (self.decay, self.decay if self.value_decay is None else self.value_decay):
            make_estimator(self.estimator, size=1, start_phi=0.0, decay=decay)
        check_settings(
            self.rate, self.space, self.metric, self.trust_region, self.gradient_decay, self.dual, anchor=self.anchor
        )
        if self.every < 1 or (self.every > 1 and not (self.anchor and self.gradient_decay > 0.0)):
            raise ConfigError(
                f"every is {self.every} with anchor {self.anchor}, estimator {self.estimator}, decay {self.decay}: "
                "steps that measure nothing go by averages that follow the distance from theta_0",
                remedy="use every 1, or anchor with estimator ema or table and a decay above 0",
            )
        if not 0.0 <= self.reserve < 1.0:
            raise ConfigError(f"reserve is {self.reserve}, expected 0 <= reserve < 1", remedy="0 uses all of alpha")

    @property
    def gradient_decay(self) -> float:
        """Weight of the past in the averaged gradient; the batch estimator averages nothing."""
        return 0.0 if self.estimator == "batch" else self.decay


def check_settings(
    rate: float,
    space: str,
    metric: str,
    trust_region: float,
    decay: float,
    dual: float = 0.0,
    *,
    anchor: bool = False,
) -> None:
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
    if not 0.0 <= dual <= 1.0:
        raise ConfigError(f"dual is {dual}, expected 0 <= dual <= 1", remedy="0.1 is a good start; 0 has no term")
    if dual > 0.0 and space != "update":
        raise ConfigError(
            f"dual {dual} with space {space!r}, which hands its multiplier to the optimizer already",
            remedy="use space 'update', or dual 0",
        )
    if anchor and space != "update":
        raise ConfigError(
            f"anchor with space {space!r}: it pulls back the applied step, which that space leaves to the optimizer",
            remedy="use space 'update', or anchor false",
        )


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
