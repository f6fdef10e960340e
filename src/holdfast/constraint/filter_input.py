"""What a filter may be given: settings in range, an optimizer whose step it can correct, and constraints."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.constraint.estimators import make_estimator
from holdfast.constraint.gradients import ParameterSpace, Vector
from holdfast.constraint.metric import METRICS
from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.core.ranks import sum_in_place, world
from holdfast.core.registry import nearest
from holdfast.defaults import default

Space = Literal["update", "gradient"]
Draw = Literal["pass", "importance"]
OWN = "_of_safety_filter"
GRAPH = "compute g from the model with gradients on: outside torch.no_grad() and inference_mode(), without .detach()"


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
            from theta_0; a step from a tenth further out measures too. Above 1 it needs `anchor` or `verify`, and
            averages.
        rest: while a set is predicted to use less than half of its room, measure it at every such step only and go by
            its averages in between; else as `every` says. Above 1 it needs what `every` needs.
        verify: how many rows of each set are looked at where a step ends half as far again from theta_0 as the last
            one that was verified, or, at most every eight steps, where an estimate is above its ceiling; such a step
            is pulled back to where these rows say that g stays below its ceiling. 0 has none. Averages follow the
            distance from theta_0, as with `anchor`. Update space only.
        draw: which rows a step measures: `pass`, all in turn, or `importance`, more often those that moved more
            (`constraint.draws`), with estimator `ema` or `batch`.
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
    rest: int = default("defense.rest")
    verify: int = default("defense.verify")
    draw: Draw = default("defense.draw")

    def __post_init__(self) -> None:
        """Refuse values out of range where they are written, not when training begins."""
        for decay in (self.decay, self.decay if self.value_decay is None else self.value_decay):
            make_estimator(self.estimator, size=1, start_phi=0.0, decay=decay)
        check_settings(
            self.rate, self.space, self.metric, self.trust_region, self.gradient_decay, self.dual,
            anchor=self.anchor or self.verify > 0,
        )  # fmt: skip
        follows = (self.anchor or self.verify > 0) and self.gradient_decay > 0.0
        for name, steps in (("every", self.every), ("rest", self.rest)):
            if steps < 1 or (steps > 1 and not follows):
                raise ConfigError(
                    f"{name} is {steps} with anchor {self.anchor}, verify {self.verify}, estimator {self.estimator}, "
                    f"decay {self.decay}: steps that do not measure a set go by averages that follow the distance from "
                    "theta_0",
                    remedy=f"use {name} 1, or anchor or verify with estimator ema or table and a decay above 0",
                )
        if self.verify < 0:
            raise ConfigError(f"verify is {self.verify}, expected a number of rows from 0", remedy="0 verifies no step")
        if self.draw not in get_args(Draw):
            raise ConfigError(f"unknown draw {self.draw!r}", remedy=nearest(self.draw, list(get_args(Draw))))
        if self.draw == "importance" and self.estimator == "table":
            raise ConfigError(
                "draw importance with estimator table, which takes every row of a batch as drawn alike",
                remedy="use estimator ema, or draw pass",
            )
        if not 0.0 <= self.reserve < 1.0:
            raise ConfigError(f"reserve is {self.reserve}, expected 0 <= reserve < 1", remedy="0 uses all of alpha")

    @property
    def gradient_decay(self) -> float:
        """Weight of the past in the averaged gradient; the batch estimator averages nothing."""
        return 0.0 if self.estimator == "batch" else self.decay


def check_settings(
    rate: float, space: str, metric: str, trust_region: float, decay: float, dual: float, *, anchor: bool
) -> None:
    """Refuse settings out of range."""
    own = f"with space {space!r}"
    for fine, what, remedy in (
        (0.0 < rate <= 1.0, f"filter rate is {rate}, expected 0 < rate <= 1", "0.3 is a good start; 1 is the paper's"),
        (space in ("update", "gradient"), f"unknown filter space {space!r}", "use 'update' or 'gradient'"),
        (metric in METRICS, f"unknown filter metric {metric!r}", f"known: {', '.join(METRICS)}"),
        (trust_region > 0.0, f"trust_region is {trust_region}, expected a positive number", "3 is the default"),
        (0.0 <= decay < 1.0, f"decay is {decay}, expected 0 <= decay < 1", "0.9 is the default"),
        (0.0 <= dual <= 1.0, f"dual is {dual}, expected 0 <= dual <= 1", "0.1 is a good start; 0 has no term"),
        (space == "update" or not dual, f"dual {dual} {own}, which hands its multiplier to the optimizer already",
         "use space 'update', or dual 0"),
        (space == "update" or not anchor,
         f"anchor or verify {own}: they pull back the applied step, which that space leaves to the optimizer",
         "use space 'update', or anchor false and verify 0"),
    ):  # fmt: skip
        if not fine:
            raise ConfigError(what, remedy=remedy)


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


def one_learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """The learning rate that all parameters share: Algorithm 1 divides the barrier's rate by it."""
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    if len(rates) > 1:
        raise ConfigError(
            f"gradient space needs one learning rate, the optimizer has {len(rates)}",
            remedy="use space 'update', which works with any optimizer, or one learning rate",
        )
    return rates.pop()


def set_flag(optimizer: torch.optim.Optimizer, space: ParameterSpace, lost: Tensor) -> bool:
    """Let the kernels of a fused Adam skip the next step where `lost` is 1 (`found_inf`); returns whether they do.

    They then leave parameters, moments and step counts as they are, and the host need not wait for the task's gradient
    before it launches the step. Fused SGD is left out: its momentum would begin with whatever lay in memory, were its
    first step skipped. Groups are asked one by one, since a loaded state brings its own `fused`, and other kernels
    refuse the flag. A flag that is there already is a gradient scaler's, and stays.
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


def differentiable(g: object) -> list[Tensor]:
    """The constraints as a list, each a scalar tensor that requires a gradient.

    A constraint without a graph has no gradient, so that one below zero would pass for a constraint that holds at every
    step: the filter would be switched off in silence.
    """
    constraints: list[Any] = [g] if isinstance(g, Tensor) or not isinstance(g, Iterable) else list(g)
    if not constraints:
        raise ConfigError(
            "SafetyFilter.step was given no constraint: the step would not be filtered",
            remedy="pass g, or call detach() and optimizer.step() for a step without a filter",
        )
    for i, one in enumerate(constraints, start=1):
        what, remedy = "", GRAPH
        if not isinstance(one, Tensor):
            what = f"is a {type(one).__name__}, expected a scalar tensor with a gradient"
            remedy = f"do not call float() or .item() on it; {GRAPH}"
        elif one.dim() != 0:
            what = f"is a tensor of shape {tuple(one.shape)}, expected a scalar"
            remedy = "reduce it first, for example with .mean(); pass several constraints as a list of scalars"
        elif not one.requires_grad:
            what = "has no graph, so it cannot be differentiated: the filter would be off"
        if what:
            name = "the constraint g" if len(constraints) == 1 else f"constraint {i} of {len(constraints)}"
            raise ConfigError(f"{name} {what}", remedy=remedy)
    return constraints


def measured_constraints(g: object, params: Sequence[Tensor]) -> tuple[list[float], list[Vector]]:
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
    for i, constraint in enumerate(constraints, start=1):
        found = torch.autograd.grad(constraint, params, retain_graph=i < len(constraints), allow_unused=True)
        if all(x is None for x in found):
            raise ConfigError(
                f"constraint {i} depends on none of the optimizer's parameters: the filter would be off",
                remedy=f"{GRAPH}; give SafetyFilter the optimizer of the model that g is computed from",
            )
        gradients.append([torch.zeros_like(p) if x is None else x for p, x in zip(params, found, strict=True)])
    values = [float(c.detach()) for c in constraints]
    # autograd.grad goes past DDP's reduction; every rank must filter with the same numbers
    return _averaged(values, gradients) if world() > 1 else (values, gradients)


def _averaged(values: list[float], gradients: list[Vector]) -> tuple[list[float], list[Vector]]:
    """Means over the ranks: the constraint of the whole batch, for equally large parts."""
    numbers = torch.tensor(values, dtype=torch.float64, device=gradients[0][0].device)
    every = [x for gradient in gradients for x in gradient]
    sum_in_place([numbers, *every])
    for x in every:
        x.div_(world())
    return [float(v) for v in (numbers / world()).tolist()], gradients


def nonfinite(what: str, of_each: Iterable[tuple[float, ...]]) -> str:
    """The first constraint of which a number is not finite, in words; empty where there is none."""
    bad = (k for k, numbers in enumerate(of_each, start=1) if not all(map(math.isfinite, numbers)))
    return next((f"{what} of constraint {k}" for k in bad), "")
