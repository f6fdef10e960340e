"""Loss spikes: discarded and named, ten in 100 steps end the run, and ordinary training never meets the rule."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.unit.trainers.building import TIGHT, build, same, weights
from tests.unit.trainers.test_nonfinite import Snapshots

from holdfast.core.errors import ConfigError, NumericalError
from holdfast.core.event_log import read
from holdfast.training import loss_spikes
from holdfast.training.loss_spikes import LIMIT, WARM_UP, SpikeWatch

# -- the rule


def watched(losses) -> tuple[SpikeWatch, list[int]]:
    """A watch that has seen these losses, and the positions it took for spikes."""
    watch = SpikeWatch()
    return watch, [i for i, loss in enumerate(losses) if watch.is_spike(i + 1, float(loss))]


def oracle(window: list[float]) -> float:
    """The limit, from numpy."""
    middle = np.median(window)
    return max(middle + max(10 * np.median(np.abs(np.array(window) - middle)), 3.0), max(window) + 1.0)


def test_the_limit_is_the_formula():
    losses = np.random.default_rng(0).gamma(2.0, 0.5, 333)
    watch, found = watched(losses)
    assert found == []
    assert watch.limit() == pytest.approx(oracle(list(losses[-200:])), rel=1e-12)


def test_nothing_is_a_spike_before_the_fiftieth_step():
    assert watched([1.0] * (WARM_UP - 1) + [1e9])[1] == []
    assert watched([1.0] * WARM_UP + [4.1])[1] == [WARM_UP]
    assert watched([1.0] * WARM_UP + [3.9])[1] == []


def test_a_spread_of_its_own_raises_the_limit():
    losses = [1.0, 3.0] * WARM_UP  # MAD 1: 12 is within ten of them
    assert watched([*losses, 11.9])[1] == []
    assert watched([*losses, 12.1])[1] == [2 * WARM_UP]


def test_after_an_ordinary_step_the_same_kind_of_batch_is_trained_on():
    losses = [1.0] * 60 + [9.0] + [1.0] * 5 + [9.0, 9.5, 10.6] + [1.0]
    assert watched(losses)[1] == [60, 68]  # 10.6 is again more than a nat above all before
    assert watched([1.0] * 60 + [9.0] * 9)[1] == list(range(60, 69))  # without one between them, they are not


def test_ten_end_the_run_and_nine_do_not():
    watch, found = watched([1.0] * 60 + [9.0] * (LIMIT - 1))
    assert len(found) == LIMIT - 1
    watch.require_passing("checkpoint-50")
    assert watch.is_spike(70, 9.0)
    with pytest.raises(NumericalError, match=r"10 of the last 100 steps.*good checkpoint is checkpoint-50") as caught:
        watch.require_passing("checkpoint-50")
    assert caught.value.exit_code == 5
    assert "spikes='off' goes on regardless" in caught.value.remedy
    with pytest.raises(NumericalError, match="no checkpoint is older"):
        watch.require_passing(None)


def test_what_no_batch_can_lose_is_never_taken_for_ordinary():
    alternating = [1.0, 31.0] * 12
    watch, found = watched([1.0] * 60 + alternating)
    assert found == list(range(61, 84, 2))
    with pytest.raises(NumericalError, match="12 of the last 100 steps"):
        watch.require_passing(None)
    watch, found = watched([1.0] * 60 + [1.0, 29.0] * 12)
    assert found == [61]
    watch.require_passing(None)


def test_spikes_far_apart_are_no_reason_to_stop():
    losses = ([1.0] * 60 + [31.0]) * 12
    watch, found = watched(losses)
    assert len(found) == 12
    watch.require_passing(None)
    assert len(watch.recent) == 2


def test_a_loss_that_is_not_finite_is_left_to_the_other_rule():
    watch, found = watched([1.0] * 60 + [math.nan, math.inf])
    assert found == []
    assert math.isfinite(watch.limit())


def test_the_state_is_complete():
    losses = [*np.random.default_rng(1).gamma(2.0, 0.5, 90), 40.0, 41.0, 1.0, 60.0, 70.0]
    whole, _ = watched(losses)
    for cut in range(0, len(losses), 7):
        first, _ = watched(losses[:cut])
        resumed = SpikeWatch()
        resumed.load_state_dict(first.state_dict())
        for i in range(cut, len(losses)):
            resumed.is_spike(i + 1, float(losses[i]))
        assert resumed.state_dict() == whole.state_dict()


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("share", [0.01, 0.02, 0.05, 0.2])
def test_ordinary_training_on_rows_of_two_kinds_is_left_alone(batch, share):
    """The hardest ordinary case: easy rows, a few wrong labels at up to 12 nats each, tiny batches, 4,000 steps."""
    draw = np.random.default_rng(7)
    hard = draw.random((4000, batch)) < share
    easy = 2.0 * np.exp(-np.arange(4000) / 300)[:, None] * draw.gamma(2.0, 0.5, (4000, batch)) + 0.02
    losses = np.where(hard, draw.uniform(4.0, 12.0, (4000, batch)), easy).mean(1)
    watch, found = watched(losses)
    assert watch.in_a_row < 3
    assert len(found) <= 4  # a first of its kind, and new records


# -- in training


def spoil(trainer, steps, factor=30.0):
    """Multiply the loss, and with it the gradient, at these steps (counted from 0)."""
    inner = trainer.compute_loss

    def spoiled(model, inputs, *args, **kwargs):
        found = inner(model, inputs, *args, **kwargs)
        return found * factor if model.training and trainer.run.progress.step in steps else found

    trainer.compute_loss = spoiled


@pytest.fixture
def _from_the_tenth_step(monkeypatch):
    """The 50 steps of the rule are run by the last test of this file."""
    monkeypatch.setattr(loss_spikes, "WARM_UP", 10)


@pytest.mark.usefixtures("_from_the_tenth_step")
@pytest.mark.parametrize("defense", ["holdfast", "sft", {"name": "holdfast", "space": "gradient"}, "lisa"])
def test_the_step_is_discarded_and_named(tmp_path, defense):
    shots = Snapshots()
    given = {"callbacks": [shots], "constraint": TIGHT, "defense": defense}
    trainer = build(tmp_path, given=given, max_steps=14, weight_decay=0.1, gradient_accumulation_steps=2)
    spoil(trainer, {11})
    trainer.train()
    rows = read(trainer.run_dir / "events.jsonl")
    assert [row["step"] for row in rows if row.get("event") == "spike"] == [12]
    assert "g" not in rows[11]
    assert same(shots.weights[10], shots.weights[11])
    assert all(torch.equal(a, b) for a, b in zip(shots.moments[10], shots.moments[11], strict=True))
    assert not same(shots.weights[11], shots.weights[12])
    assert trainer.recorder.spikes.steps == [12]


@pytest.mark.usefixtures("_from_the_tenth_step")
def test_off_applies_it(tmp_path):
    trainer = build(tmp_path, max_steps=13, spikes="off")
    spoil(trainer, {11})
    trainer.train()
    assert "spike" not in {row["event"] for row in read(trainer.run_dir / "events.jsonl")}
    with pytest.raises(ConfigError, match="spikes is 'on'"):
        build(tmp_path, spikes="on")


@pytest.mark.usefixtures("_from_the_tenth_step")
def test_spikes_that_do_not_pass_end_the_run_with_the_last_good_checkpoint(tmp_path):
    trainer = build(tmp_path, max_steps=50, save_strategy="steps", save_steps=4, save_total_limit=2)
    spoil(trainer, set(range(20, 50)))
    with pytest.raises(NumericalError) as caught:
        trainer.train()
    # checkpoint-20 holds the very weights at which the first spike was measured
    assert f"the last good checkpoint is {trainer.store.root / 'checkpoint-16'}" in caught.value.what
    assert "10 of the last 100 steps" in caught.value.what
    assert trainer.run.progress.step == 29
    trainer.store.verify(trainer.store.root / "checkpoint-16")  # not rotated away by those of the spikes


def test_a_run_resumed_among_spikes_ends_with_the_same_weights(tmp_path):
    def made():
        given = {"constraint": TIGHT}
        trainer = build(tmp_path, given=given, max_steps=60, save_strategy="steps", save_steps=53)
        spoil(trainer, {50, 52, 53, 57})
        return trainer

    whole = made()
    whole.train()
    assert whole.recorder.spikes.steps == [51, 53, 54, 58]
    resumed = made()
    resumed.train(resume_from_checkpoint=str(whole.store.root / "checkpoint-53"))
    assert same(weights(whole), weights(resumed))
    assert resumed.recorder.spikes.state_dict() == whole.recorder.spikes.state_dict()
