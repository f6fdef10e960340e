"""A simulated harmful step: what several alignment defenses look one step ahead with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.constraint.gradients import Vector
from holdfast.data.encode import Encoded
from holdfast.trainers.hooks import TrainingRun
from holdfast.trainers.side_pass import token_mean_nll
from holdfast.trainers.support import require_float32

SMALLEST_NORM = 1e-7


def harmful_batch(run: TrainingRun, size: int | None) -> list[int]:
    """Positions of this step's harmful pairs, of all processes; without `size` as many as task rows."""
    return run.draw(run.harmful, "harmful", size or run.task_batch)


def require_harmful_step(run: TrainingRun, size: int | None) -> None:
    """Refuse, before anything is measured, weights too coarse for the step, and a batch that cannot be shared.

    Raises:
        UnsupportedError: trainable weights not in float32 or float64.
        ConfigError: no trainable weights, or `size` is no multiple of the number of processes.
    """
    require_float32(run.model)
    harmful_batch(run, size)


@contextmanager
def harmful_step(run: TrainingRun, rows: list[Encoded], radius: float) -> Iterator[tuple[float, Vector]]:
    """L_harm and its gradient g at theta; inside, the model is at `theta - radius g / (norm(g) + 1e-7)`."""
    space = run.space()
    losses, here = run.side_gradient(rows, token_mean_nll(rows))
    norm = space.dots([(here, here)])[0] ** 0.5
    with space.moved(here, -radius / (norm + SMALLEST_NORM)):
        yield float(losses.sum()), here
