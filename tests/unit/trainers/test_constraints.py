"""Several constraints at once, and the start of a run: refused, allowed or warned about."""

from __future__ import annotations

import logging

import pytest
from tests import tiny
from tests.unit.trainers.building import SLACK, TIGHT, build, safety

import holdfast as hf
from holdfast.core.errors import ConfigError, InfeasibleError
from holdfast.core.event_log import read

RATE = "eval_safety_violation_rate"
SETS = {"refusal": lambda: safety(20), "over_refusal": lambda: tiny.dataset(15, seed=4, start="w3")}


def sets():
    return {name: make() for name, make in SETS.items()}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    limits = {"refusal": TIGHT, "over_refusal": hf.ChanceConstraint(tau=0.02, alpha=0.1, beta=50.0, unit="nll_token")}
    folder = tmp_path_factory.mktemp("two")
    trainer = build(folder, given={"safety_dataset": sets(), "constraint": limits}, max_steps=6)
    trainer.train()
    return trainer, limits


def test_each_set_has_its_own_constraint_and_files(two):
    trainer, limits = two
    assert {name: s.constraint for name, s in trainer.safety.items()} == limits
    for name in SETS:
        assert (trainer.run_dir / name / "reference.json").exists()
        assert (trainer.run_dir / name / "splits.json").exists()
    assert not (trainer.run_dir / "reference.json").exists()


def test_rows_hold_both_constraints(two):
    trainer, _ = two
    rows = read(trainer.run_dir / "events.jsonl")
    for row in rows:
        assert set(row["constraints"]) == set(SETS)
        assert {"g", "violation_rate", "value", "multiplier"} <= row["constraints"]["over_refusal"].keys()
    assert any(all(one["multiplier"] > 0 for one in row["constraints"].values()) for row in rows)
    active = [row for row in rows if row["event"] == "active"]
    assert active
    assert all(row["residual"] <= 1e-6 for row in active)


def test_both_are_monitored_and_the_worst_leads(two):
    trainer, _ = two
    found = trainer.evaluate()
    each = [found[f"eval_safety_{name}_violation_rate"] for name in SETS]
    assert found[RATE] == max(each)
    assert found["eval_safety_over_refusal_n"] == 3
    assert trainer.run.data.safety_batch("refusal") != trainer.run.data.safety_batch("over_refusal")


def test_one_constraint_serves_all_sets(tmp_path):
    trainer = build(tmp_path, given={"safety_dataset": sets(), "constraint": SLACK})
    assert {s.constraint for s in trainer.safety.values()} == {SLACK}


def test_names_must_agree(tmp_path):
    with pytest.raises(ConfigError, match="over_refusal") as caught:
        build(tmp_path, given={"safety_dataset": sets(), "constraint": {"refusal": SLACK, "helpful": SLACK}})
    assert "helpful" in caught.value.what
    with pytest.raises(ConfigError, match="safety set name"):
        build(tmp_path, given={"safety_dataset": {"../out": safety()}, "constraint": SLACK})


INFEASIBLE = {"tau": 0.1, "beta": 1.0}


def test_an_infeasible_start_is_refused(tmp_path):
    with pytest.raises(InfeasibleError, match="infeasible start") as caught:
        build(tmp_path, given={"constraint": hf.ChanceConstraint(**INFEASIBLE, unit="nll_token")})
    assert caught.value.exit_code == 4
    assert "beta >= 9.5" in caught.value.remedy


def test_an_infeasible_start_can_be_allowed_and_is_recorded(tmp_path):
    c = hf.ChanceConstraint(**INFEASIBLE, unit="nll_token", allow_infeasible_start=True)
    trainer = build(tmp_path, given={"constraint": c})
    trainer.train()
    events = [row["event"] for row in read(trainer.run_dir / "events.jsonl")]
    assert events[0] == "infeasible_start"
    assert "infeasible_start" not in events[1:]
    assert trainer.fingerprint()["constraints"]["safety"]["allow_infeasible_start"] is True


def test_a_small_safety_batch_only_warns(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        build(tmp_path, safety_batch_size=10, given={"defense": {"name": "holdfast", "estimator": "batch"}})
    assert "10 examples per step with alpha=0.05" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        build(tmp_path / "a", safety_batch_size=10)  # averages over steps
        build(tmp_path / "b", safety_batch_size=20, given={"defense": {"name": "holdfast", "estimator": "batch"}})
    assert "examples per step" not in caplog.text


def test_safety_batches_are_a_function_of_seed_and_step(tmp_path):
    first, second = build(tmp_path / "a", safety_batch_size=4), build(tmp_path / "b", safety_batch_size=4)
    drawn = []
    for number in range(3):
        first.state.global_step = second.state.global_step = number
        assert first.run.data.safety_batch("safety") == second.run.data.safety_batch("safety")
        drawn += first.run.data.safety_batch("safety")
    assert sorted(drawn) == list(range(12))  # one pass over the constraint split, without replacement
