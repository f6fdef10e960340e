"""Differences between models, prompt by prompt and seed by seed, with one-sided 95 % bounds.

d_is is the difference on prompt i of n with seed s of S, for example harmful after training (0 or 1) minus harmful as
shipped. Prompts and seeds both count as drawn (a two-way layout, as readers and cases in diagnostic studies):

    MS_P = S sum_i (d_i. - d..)^2 / (n - 1)         MS_S = n sum_s (d_.s - d..)^2 / (S - 1)
    MS_E = sum_is (d_is - d_i. - d_.s + d..)^2 / ((n - 1)(S - 1))
    V = (MS_P + max(MS_S - MS_E, 0)) / (n S)        bound = d.. +- t V^(1/2)

with t the 95 % quantile of Student's distribution with Satterthwaite's degrees of freedom. One seed: V = MS_P / n with
n - 1 degrees of freedom; then nothing is said about other seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """A mean difference with its bounds, each at 95 %."""

    mean: float
    lower: float
    upper: float
    prompts: int
    seeds: int


def difference(values: NDArray[np.float64]) -> Difference:
    """The mean of d_is with its bounds; rows are prompts, columns seeds."""
    n, seeds = values.shape
    mean = float(values.mean())
    by_prompt, by_seed = values.mean(axis=1), values.mean(axis=0)
    prompts_square = seeds * float(((by_prompt - mean) ** 2).sum()) / (n - 1)
    variance, freedom = prompts_square / (n * seeds), float(n - 1)
    if seeds > 1:
        seeds_square = n * float(((by_seed - mean) ** 2).sum()) / (seeds - 1)
        rest = values - by_prompt[:, None] - by_seed[None] + mean
        rest_freedom = (n - 1) * (seeds - 1)
        rest_square = float((rest**2).sum()) / rest_freedom
        if seeds_square > rest_square:
            parts = ((prompts_square, n - 1), (seeds_square, seeds - 1), (rest_square, rest_freedom))
            total = prompts_square + seeds_square - rest_square
            variance = total / (n * seeds)
            freedom = total**2 / sum(square**2 / free for square, free in parts)
    half = float(stdtrit(freedom, LEVEL)) * variance**0.5
    return Difference(mean, mean - half, mean + half, n, seeds)


def columns(bits: Sequence[str], hit: str = "1") -> NDArray[np.float64]:
    """One column for each string, one row for each of its characters: 1 where it is `hit`."""
    lengths = {len(one) for one in bits}
    if len(lengths) != 1:
        raise ValueError(f"strings of {sorted(lengths)} characters, expected as many in each: other prompts were asked")
    return np.array([[float(character == hit) for character in one] for one in bits]).T
