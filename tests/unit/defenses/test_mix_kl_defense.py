"""Replay and KL anchor: settings, refusals, what they log, the pairs they use, resuming, autocast and checkpointing."""

from __future__ import annotations

import math

import pytest
import torch
from tests import tiny
from tests.unit.trainers.building import build, same, weights

from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.core.event_log import read
from holdfast.data.streams import StepStream
from holdfast.training.hooks import make_defense

BOTH = pytest.mark.parametrize("name", ["mix", "kl"])
FIGURE = {"mix": "safe_loss", "kl": "kl"}


@BOTH
@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")], ids=str)
def test_weights_out_of_range_are_refused(name, weight):
    with pytest.raises(ConfigError) as caught:
        make_defense({"name": name, "weight": weight})
    assert f"{name}: weight is {weight}" in caught.value.what
    assert caught.value.remedy


@BOTH
def test_safe_pairs_are_needed(tmp_path, name):
    with pytest.raises(ConfigError, match="needs a safety set"):
        build(tmp_path, given={"defense": name, "safety_dataset": None, "constraint": None})


@BOTH
def test_trainable_weights_in_bfloat16_are_refused(tmp_path, name):
    given = {"model": tiny.model(layers=1, dtype=torch.bfloat16), "peft_config": None, "defense": name}
    with pytest.raises(UnsupportedError, match="bfloat16"):
        build(tmp_path, given=given)


@BOTH
def test_the_term_is_logged_and_only_constraint_pairs_are_used(tmp_path, name):
    trainer = build(tmp_path, given={"defense": name}, safety_batch_size=5)
    drawn, side_gradient = [], trainer.run.engine.side_gradient

    def noted(rows, loss):
        drawn.append([row.id for row in rows])
        return side_gradient(rows, loss)

    trainer.run.engine.side_gradient = noted
    trainer.train()
    rows = read(trainer.run_dir / "events.jsonl")
    assert all(math.isfinite(row[FIGURE[name]]) for row in rows)
    assert rows[-1][FIGURE[name]] > 1e-5
    assert any(f"safety/{FIGURE[name]}" in entry for entry in trainer.state.log_history)
    safe = trainer.run.data.safe
    draws = StepStream(len(safe), 5, trainer.args.stream_seed, name)
    assert drawn == [[safe[i].id for i in draws.indices(t)] for t in range(3)]


def test_resumed_kl_is_the_uninterrupted_run(tmp_path):
    """With all weights trained theta_0 is a copy, taken before the checkpoint is loaded."""

    def made():
        given = {"defense": "kl", "peft_config": None}
        return build(tmp_path, given=given, max_steps=4, save_strategy="steps", save_steps=2)

    whole = made()
    whole.train()
    rows = read(whole.run_dir / "events.jsonl")
    resumed = made()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert same(weights(whole), weights(resumed))
    assert [row["kl"] for row in read(resumed.run_dir / "events.jsonl")] == [row["kl"] for row in rows]


def test_divergence_is_from_the_head_theta_0_had(tmp_path):
    """A trained head is in the same memory now and at theta_0; here only the head is trained."""
    given = {"peft_config": None, "model": tiny.model(layers=1), "defense": "kl"}
    for name, p in given["model"].named_parameters():
        p.requires_grad = name == "lm_head.weight"
    trainer = build(tmp_path, given=given, optim="sgd", learning_rate=0.5)
    trainer.train()
    rows = read(trainer.run_dir / "events.jsonl")
    assert abs(rows[0]["kl"]) < 1e-6
    assert rows[-1]["kl"] > 1e-4
