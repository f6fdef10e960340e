"""A harmful loss or gradient that is not a number never reaches the weights in alignment either."""

from __future__ import annotations

import math

import pytest
from tests import tiny
from tests.unit.trainers.building import build, same, weights

from holdfast.core.errors import NumericalError
from holdfast.core.event_log import read
from holdfast.training import step

NOTHING = {"safety_dataset": None, "constraint": None}


def aligned(folder, defense, **options):
    given = {**NOTHING, "defense": defense, "harmful_dataset": tiny.dataset(8, seed=5, start="w3")}
    trainer = build(folder, given=given, **{"stage": "align", "max_steps": 2, **options})
    trainer.train()
    return trainer


@pytest.fixture
def spoiled(monkeypatch):
    real = step.side_gradient  # type: ignore[attr-defined]

    def spoil(*args):
        values, gradient = real(*args)
        gradient[0].view(-1)[0] = math.nan
        return values, gradient

    monkeypatch.setattr(step, "side_gradient", spoil)


@pytest.mark.parametrize("defense", ["booster", "antibody"])
def test_the_step_is_that_of_the_safe_pairs_alone(tmp_path, spoiled, defense):
    trainer, plain = aligned(tmp_path / "own", defense), aligned(tmp_path / "sft", "sft")
    assert same(weights(trainer), weights(plain))
    rows = read(trainer.run_dir / "events.jsonl")
    assert [(row["event"], row["harmful_loss"]) for row in rows] == [("nonfinite", None)] * 2
    assert trainer.defense.state_dict()["left_out"] == [0, 1]


@pytest.mark.parametrize("defense", ["booster", "antibody"])
def test_many_such_steps_end_the_run(tmp_path, spoiled, defense):
    with pytest.raises(NumericalError, match=defense):
        aligned(tmp_path, defense, max_steps=6)
