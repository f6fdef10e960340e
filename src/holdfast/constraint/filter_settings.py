"""What a filter may be asked for: ranges of its settings, and optimizers whose step it can correct."""

import math
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
        caution: how many errors of the averaged gradient must stay within what a step may use; a step that is too long
            for that is shortened before it is corrected; 0 never shortens. Update space only.
        dual: how much the weight of the constraint's gradient in the optimizer's own may change in a step, so that
            fewer steps need a correction; 0 has no such term. Update space only.
        span: largest share of the steps so far that the averages of value and gradient span, so that they are short
            while everything moves; None: as far as the decays say.
    """

    space: Space = default("defense.space")
    rate: float = default("defense.rate")
    metric: str = default("defense.metric")
    trust_region: float = default("defense.trust_region")
    estimator: str = default("defense.estimator")
    decay: float = default("defense.decay")
    value_decay: float | None = default("defense.value_decay")
    reserve: float = default("defense.reserve")
    caution: float = default("defense.caution")
    dual: float = default("defense.dual")
    span: float | None = default("defense.span")

    def __post_init__(self) -> None:
        """Refuse values out of range where they are written, not when training begins."""
        for decay in (self.decay, self.decay if self.value_decay is None else self.value_decay):
            make_estimator(self.estimator, size=1, start_phi=0.0, decay=decay)
        check_settings(
            self.rate, self.space, self.metric, self.trust_region, self.gradient_decay, self.caution, self.dual,
            self.span,
        )  # fmt: skip
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
    caution: float = 0.0,
    dual: float = 0.0,
    span: float | None = None,
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
    if not 0.0 <= caution < math.inf:
        raise ConfigError(
            f"caution is {caution}, expected 0 or more", remedy="0.3 shortens uncertain steps; 0 shortens none"
        )
    if not 0.0 <= dual <= 1.0:
        raise ConfigError(f"dual is {dual}, expected 0 <= dual <= 1", remedy="0.1 is a good start; 0 has no term")
    if span is not None and not 0.0 < span <= 1.0:
        raise ConfigError(f"span is {span}, expected 0 < span <= 1", remedy="0.2 is a good start; null has no limit")
    if span is not None and decay == 0.0:
        raise ConfigError(
            f"span {span} where nothing is averaged over steps (estimator batch, or decay 0)",
            remedy="use an estimator that averages (ema or table), or leave span out",
        )
    if dual > 0.0 and space != "update":
        raise ConfigError(
            f"dual {dual} with space {space!r}, which hands its multiplier to the optimizer already",
            remedy="use space 'update', or dual 0",
        )
    if caution > 0.0 and (space != "update" or decay == 0.0):
        raise ConfigError(
            f"caution {caution} with space {space!r} and averages of decay {decay}: it compares a batch's gradient "
            "with the average over steps, and shortens the applied step",
            remedy="use space 'update' with an estimator that averages (ema or table), or caution 0",
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
