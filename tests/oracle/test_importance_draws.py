"""Rows drawn by importance: probabilities by hand, and a weighted mean that is the mean over all rows."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.constraint.draws import SHARE, ImportanceDraws
from holdfast.constraint.filter_input import FilterOptions
from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.training.side_pass import safety_gradient
from holdfast.training.steering import Steering
from tests.unit.trainers.building import TIGHT, build


def seen_by(terms: list[float], index: list[int] | None = None, size: int | None = None) -> ImportanceDraws:
    draws = ImportanceDraws(size or len(terms))
    draws.remember(torch.tensor(index or range(len(terms))), torch.tensor(terms, dtype=torch.float64))
    return draws


def test_probabilities_by_hand():
    assert ImportanceDraws(4).probabilities().tolist() == [0.25] * 4
    assert seen_by([0.0] * 4).probabilities().tolist() == [0.25] * 4
    draws = seen_by([3.0, 1.0, -2.0], [0, 1, 2], size=4)  # row 3 counts as the mean, (3 + 1 + 0) / 3
    shares = np.array([3.0, 1.0, 0.0, 4 / 3]) / (16 / 3)
    assert draws.probabilities().numpy() == pytest.approx((1 - SHARE) / 4 + SHARE * shares)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_weighted_mean_is_the_mean_over_all_rows(size):
    """Integrated over the first offset, for a table that has little to do with the terms of today."""
    draw = np.random.default_rng(0)
    draws, today = seen_by(draw.exponential(size=23).tolist()), draw.exponential(size=23)
    first = (np.arange(20_000) + 0.5) / 20_000
    means = []
    for u in first:
        batch = draws.batch(size, 5, float(u))
        means.append(float((batch.weights.numpy() * today[batch.positions]).mean()))
    assert np.mean(means) == pytest.approx(today.mean(), rel=2e-3)


def test_no_weight_is_larger_than_the_even_draws_allow():
    draws = seen_by([0.0] * 99 + [1.0])
    batch = draws.batch(50, 0, 0.4)
    assert float(batch.weights.max()) <= 1 / (1 - SHARE) + 1e-12
    assert Counter(batch.positions)[99] == pytest.approx(50 * float(draws.probabilities()[99]), abs=1)


def test_batches_fill_each_others_gaps():
    """Of rows that count alike, 55 draws of 50 leave few out; independent ones would leave a third."""
    draws = ImportanceDraws(50)
    drawn = [at for step in range(55) for at in draws.batch(1, step, 0.3).positions]
    assert len(set(drawn)) >= 45


def test_it_varies_less_than_draws_of_all_rows_in_turn():
    """A few rows carry nearly all of g, and the table knows them well but not exactly."""
    draw = np.random.default_rng(1)
    today = draw.exponential(size=200) ** 4
    draws = seen_by((today * draw.uniform(0.5, 2.0, size=200)).tolist())
    estimates = []
    for step in range(400):
        batch = draws.batch(4, step, 0.1)
        estimates.append(float((batch.weights.numpy() * today[batch.positions]).mean()))
    even = [float(draw.choice(today, 4, replace=False).mean()) for _ in range(400)]
    assert np.std(estimates) < 0.4 * np.std(even)


def test_terms_are_kept_as_shares_of_the_squared_distance():
    """A KL that grows with it: rows seen near theta_0 and far from it are compared at one distance."""
    draws = ImportanceDraws(2)
    draws.remember(torch.tensor([0]), torch.tensor([0.01], dtype=torch.float64), 0.25)
    draws.remember(torch.tensor([1]), torch.tensor([0.16], dtype=torch.float64), 4.0)
    assert draws.probabilities().tolist() == pytest.approx([0.5, 0.5])
    draws.remember(torch.tensor([1]), torch.tensor([9.0], dtype=torch.float64), 0.0)  # theta_0 itself says nothing
    assert draws.probabilities().tolist() == pytest.approx([0.5, 0.5])


def test_what_rounding_adds_is_no_importance():
    """A row at the floor, seen near theta_0, does not outweigh one that has moved far from it."""
    draws = ImportanceDraws(2)
    draws.remember(torch.tensor([0]), torch.tensor([5e-4], dtype=torch.float64), 1e-4, floor=5e-4)
    draws.remember(torch.tensor([1]), torch.tensor([0.1], dtype=torch.float64), 1.0, floor=5e-4)
    assert draws.probabilities().tolist() == pytest.approx([(1 - SHARE) / 2, (1 + SHARE) / 2])


def test_a_table_of_another_size_is_refused():
    draws = ImportanceDraws(3)
    with pytest.raises(CheckpointError, match=r"shape \(4,\), expected \(3,\)"):
        draws.load_state_dict(ImportanceDraws(4).state_dict())


def test_the_gradient_is_that_of_the_weighted_terms(tmp_path):
    """Against autograd over each row by itself, in micro-batches of two."""
    trainer = build(tmp_path, given={"constraint": TIGHT}, safety_batch_size=5)
    trainer.train()
    run, (name, one) = trainer.run, next(iter(trainer.run.data.safety.items()))
    positions, weights = [3, 0, 3, 7, 5], torch.tensor([0.5, 1.5, 0.5, 2.0, 0.1], dtype=torch.float64)

    def term(d: torch.Tensor) -> torch.Tensor:
        return 3.0 * d**2 + d

    d, found = safety_gradient(run.forward, one, positions, term, run.space(), 2, weights)
    alone = [safety_gradient(run.forward, one, [at], term, run.space(), 1) for at in positions]
    assert d.tolist() == pytest.approx([float(x[0]) for x, _ in alone], rel=1e-4)
    for i, part in enumerate(found):
        expected = sum(w * g[i] for w, (_, g) in zip(weights.tolist(), alone, strict=True)) / len(positions)
        assert torch.allclose(part, expected, rtol=1e-3, atol=1e-7), name


def test_a_run_draws_its_rows_by_what_it_saw_of_them(tmp_path, monkeypatch):
    drawn, expected = Counter[int](), np.zeros(12)
    inner = ImportanceDraws.batch

    def noted(self: ImportanceDraws, size: int, step: int, first: float) -> Any:
        batch = inner(self, size, step, first)
        drawn.update(batch.positions)
        expected.__iadd__(size * self.probabilities().numpy())
        return batch

    monkeypatch.setattr(ImportanceDraws, "batch", noted)
    trainer = build(
        tmp_path, given={"defense": {"name": "holdfast", "draw": "importance"}, "constraint": TIGHT},
        max_steps=40, safety_batch_size=2,
    )  # fmt: skip
    trainer.train()
    defense: Any = trainer.defense
    seen = defense._steering["safety"].draws.seen
    assert (bool(seen.isnan().any()), sum(drawn.values())) == (False, 80)
    assert expected.max() > 1.3 * expected.min()
    assert np.corrcoef(expected, [drawn[at] for at in range(12)])[0, 1] > 0.6


def test_the_share_of_violations_is_weighted():
    constraint = hf.ChanceConstraint(tau=0.1, alpha=0.05, beta=10.0, unit="nll_token")
    steering = Steering(
        SimpleNamespace(constraint=constraint, constraint_set=[None] * 4), FilterOptions(draw="importance")
    )
    found = steering.figures(torch.tensor([0.2, 0.0]), torch.tensor([0.5, 1.5]))
    assert found == {"violation_rate": 0.25, "cvar": None}
    assert math.isfinite(steering.start())


def test_entropic_is_refused():
    constraint = hf.ChanceConstraint(tau=0.5, alpha=0.05, beta=10.0, majorizer="entropic", unit="nll_token")
    with pytest.raises(ConfigError, match="ratio of means"):
        Steering(SimpleNamespace(constraint=constraint, constraint_set=[None] * 4), FilterOptions(draw="importance"))
