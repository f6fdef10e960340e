"""Estimates of mean phi over the whole constraint split from one safety minibatch a step.

A batch of 10 cannot express alpha = 0.05: one violator overspends the budget. An estimator therefore carries what it
knows from step to step, and its state is part of a checkpoint. `index` are the positions of rows in the split, int64;
values are float64, on the CPU.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from holdfast.constraint.anchor import scaled
from holdfast.constraint.chance import TAIL_SHARE
from holdfast.core.errors import CheckpointError, ConfigError, DataError, NumericalError
from holdfast.core.registry import nearest

State = dict[str, Tensor | float | int]
Stored = Mapping[str, Tensor | float | int]


class BatchEstimator:
    """The batch's own mean: unbiased, and as noisy as the batch is small. Its floor is `start_phi`, phi(-tau)."""

    def __init__(self, start_phi: float = 0.0) -> None:
        self.floor = start_phi

    def update(self, index: Tensor, phi: Tensor, square: float | None = None) -> float:
        return float(_checked(index, phi).mean())

    def predict(self, square: float) -> float:
        raise ConfigError("the batch estimator remembers nothing between steps", remedy="use estimator ema or table")

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: Stored) -> None:
        """Has nothing to take over."""


class EmaEstimator:
    """A debiased exponential moving average of batch means; decay 0.9 cuts the variance 19-fold.

    m_k = m_{k-1} + w_k (x_k - m_{k-1}) with w_k = (1 - decay) / (1 - decay^k), so that the first estimate is the first
    batch's mean. With squared distances from theta_0 it is scaled to the newest one (`constraint.anchor`). No floor is
    below phi(-tau), `start_phi`.
    """

    def __init__(self, decay: float = 0.9, start_phi: float = 0.0) -> None:
        self.decay, self.start_phi, self.floor = _checked_decay(decay), start_phi, math.inf
        self.steps, self.mean, self.mean_square = 0, 0.0, 0.0

    def update(self, index: Tensor, phi: Tensor, square: float | None = None) -> float:
        """Takes one batch in, measured at this squared distance from theta_0; returns the estimate of mean phi."""
        return self.absorb(float(_checked(index, phi).mean()), square)

    def absorb(self, x: float, square: float | None = None) -> float:
        """Takes one scalar in; at theta_0 itself there is nothing to average yet."""
        if square == 0.0:
            return x
        self.steps += 1
        weight = average_weight(self.decay, self.steps)
        self.mean += weight * (x - self.mean)
        if square is None:
            return self.mean
        self.mean_square += weight * (square - self.mean_square)
        self.floor = max(self.start_phi, min(self.floor, x))
        return self.predict(square)

    def predict(self, square: float) -> float:
        """Returns the average as it would be at this squared distance from theta_0, without a new batch."""
        return scaled(self.floor, self.mean, square, self.mean_square)

    def state_dict(self) -> State:
        """Returns the averages and the number of batches in them."""
        floor = self.start_phi if math.isinf(self.floor) else self.floor
        return {"mean": self.mean, "mean_square": self.mean_square, "floor": floor, "steps": self.steps}

    def load_state_dict(self, state: Stored) -> None:
        """Takes over the averages and the number of batches in them."""
        self.mean, self.steps = float(state["mean"]), int(state["steps"])
        self.mean_square = float(state.get("mean_square", 0.0))  # not in checkpoints of earlier versions
        self.floor = float(state.get("floor", math.inf)) if self.mean_square > 0.0 else math.inf


class TableEstimator(EmaEstimator):
    """A regression control variate on each example's last-seen phi, then the exponential moving average.

    x = mean_B phi + c (mean_table p - mean_B p), c = Cov(phi, phi~) / Var(phi~) in [0, 1], where p = phi~ + delta a is
    what the last-seen phi~ of `a` steps ago would be today, and delta = mean_B (phi - phi~) / mean_B a the drift of a
    step. A pass draws without replacement, so a batch holds the rows seen longest ago: with p = phi~, x would count
    their drift for all rows. The moments behind c are moving averages over earlier batches, with `decay` as the final
    one: a batch of 10 is too small for them. The table starts at phi(-tau), exact for the unchanged model.
    """

    def __init__(self, size: int, start_phi: float, decay: float = 0.9) -> None:
        super().__init__(decay, start_phi)
        self.table = torch.full((checked_size(size),), start_phi, dtype=torch.float64)
        self.visited = torch.zeros(size, dtype=torch.float64)  # the update that last saw a row; 0: none yet
        self.moments = torch.zeros(4, dtype=torch.float64)

    def update(self, index: Tensor, phi: Tensor, square: float | None = None) -> float:
        """Returns the average including the corrected batch mean, and remembers the batch's phi."""
        phi = _checked(index, phi)
        if square == 0.0:  # at theta_0, which the table starts from
            return float(phi.mean())
        seen = self.table[index]
        now = self.steps + 1
        drift = (phi - seen).mean() / (now - self.visited[index]).mean()
        lately = (self.table.mean() - seen.mean()) + drift * (self.visited[index].mean() - self.visited.mean())
        estimate = self.absorb(float(phi.mean() + self.coefficient() * lately), square)
        # Measured from the start value, so that rows never seen before are exact zeros in the moments.
        new, old = phi - self.start_phi, seen - self.start_phi
        moments = torch.stack([new.mean(), old.mean(), (new * old).mean(), old.square().mean()])
        self.moments += average_weight(self.decay, self.steps) * (moments - self.moments)
        remember(self.table, index, phi)
        self.visited[index] = float(now)
        return estimate

    def coefficient(self) -> float:
        """Returns c = Cov(phi, phi~) / Var(phi~) clipped to [0, 1]; 0 while all phi~ seen are equal."""
        new, old, product, square = self.moments.tolist()
        variance = square - old * old
        return min(max((product - new * old) / variance, 0.0), 1.0) if variance > 0 else 0.0

    def state_dict(self) -> State:
        """Returns the table, when its rows were seen, the moments and the average."""
        tensors = {"table": self.table.clone(), "visited": self.visited.clone(), "moments": self.moments.clone()}
        return {**tensors, **super().state_dict()}

    def load_state_dict(self, state: Stored) -> None:
        """In a state of an earlier version all rows count as seen together."""
        super().load_state_dict(state)
        self.table = loaded_table(state, len(self.table))
        self.moments = torch.as_tensor(state["moments"], dtype=torch.float64).clone()
        visited = state.get("visited", torch.full((len(self.table),), float(self.steps)))
        self.visited = torch.as_tensor(visited, dtype=torch.float64).clone()


class TailThreshold:
    """The moving start t of cvar's tail: t <- t + (1 - decay) (VaR - t), VaR clipped to [0, 0.9 tau].

    VaR is the (1 - alpha) quantile of each example's last-seen degradation (0 before the first visit), the minimiser of
    G(t) = t + mean (D - t)_+ / alpha. G is convex, so a move towards it never increases G: adapting t does not break
    feasibility. t stays undebiased, to move slowly at first too.
    """

    def __init__(self, size: int, *, tau: float, alpha: float, decay: float = 0.9, start: float = 0.0) -> None:
        self.limit, self.alpha, self.decay = TAIL_SHARE * tau, alpha, _checked_decay(decay)
        self.table = torch.zeros(checked_size(size), dtype=torch.float64)
        self.t = min(max(start, 0.0), self.limit)

    def update(self, index: Tensor, degradation: Tensor) -> float:
        """Remembers the batch's degradations and returns the new t."""
        remember(self.table, index, _checked(index, degradation))
        # With floor(alpha n) examples above it, moving t further down would cost more tail than it gains.
        above = min(math.floor(self.alpha * len(self.table)), len(self.table) - 1)
        quantile = float(self.table.topk(above + 1).values[-1])
        self.t += (1 - self.decay) * (min(max(quantile, 0.0), self.limit) - self.t)
        return self.t

    def state_dict(self) -> State:
        return {"table": self.table.clone(), "t": self.t}

    def load_state_dict(self, state: Stored) -> None:
        self.table, self.t = loaded_table(state, len(self.table)), float(state["t"])


Estimator = BatchEstimator | EmaEstimator
"""A running estimate of mean phi; `floor` is the least that a batch had away from theta_0."""


def make_estimator(name: str, *, size: int, start_phi: float, decay: float = 0.9) -> Estimator:
    """The estimator called batch, ema or table, of so many examples; `start_phi` is phi(-tau)."""
    if name == "batch":
        return BatchEstimator(start_phi)
    if name == "ema":
        return EmaEstimator(decay, start_phi)
    if name == "table":
        return TableEstimator(size, start_phi, decay)
    raise ConfigError(f"unknown estimator {name!r}", remedy=nearest(name, ["batch", "ema", "table"]))


def average_weight(decay: float, step: int) -> float:
    """Returns the weight of the newest of `step` values in a debiased average; 1 for the first."""
    return (1 - decay) / (1 - decay**step)


def remember(table: Tensor, index: Tensor, values: Tensor) -> None:
    """Writes values into table[index]; a row that occurs several times gets its mean, not any one of them."""
    rows, place, count = torch.unique(index, return_inverse=True, return_counts=True)
    table[rows] = torch.zeros(len(rows), dtype=table.dtype).index_add_(0, place, values) / count


def _checked(index: Tensor, values: Tensor) -> Tensor:
    if index.shape != values.shape or values.ndim != 1 or values.numel() == 0:
        raise DataError(
            f"estimator: index has shape {tuple(index.shape)} and values {tuple(values.shape)}, "
            "expected two non-empty vectors of one length",
            remedy="pass one value per row of the safety batch, and at least one row",
        )
    # One infinity would stay in the average and the table for the rest of the run.
    if len(bad := index[~values.isfinite()]):
        raise NumericalError(
            f"estimator: {len(bad)} of {len(values)} values are not finite, at rows {bad[:10].tolist()}",
            remedy="discard this step; with the exponential majorizer, lower beta",
        )
    return values


def _checked_decay(decay: float) -> float:
    if not 0 <= decay < 1:
        raise ConfigError(f"estimator: decay = {decay}, expected 0 <= decay < 1", remedy="set decay to 0.9")
    return decay


def checked_size(size: int) -> int:
    if size < 1:
        raise DataError(f"estimator: {size} rows, expected at least 1", remedy="add safety examples")
    return size


def loaded_table(state: Stored, size: int) -> Tensor:
    table = torch.as_tensor(state["table"], dtype=torch.float64)
    if table.shape != (size,):
        raise CheckpointError(
            f"estimator: the stored table has shape {tuple(table.shape)}, expected ({size},)",
            remedy="resume with the safety data that the run started with",
        )
    return table.clone()
