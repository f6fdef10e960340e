"""`benchmarks.barrier`: how a run is written, and what its record holds."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks import barrier
from tests.unit.trainers.building import TIGHT, build

from holdfast import ChanceConstraint
from holdfast.core.errors import ConfigError
from holdfast.runs.config.load import config_from_dict


def test_a_run_is_a_defense_its_options_and_a_rate():
    text = "holdfast anchor=true reserve=0.4 dual=1e-1 metric=adam_unit rate=1e-3"
    expected = {"name": "holdfast", "anchor": True, "reserve": 0.4, "dual": 0.1, "metric": "adam_unit"}
    assert barrier.parsed(text) == (expected, 1e-3, {})
    assert barrier.parsed("sft rate=3e-4") == ({"name": "sft"}, 3e-4, {})
    found = barrier.parsed("holdfast rate=3e-4 train.safety_batch_size=1")
    assert found == ({"name": "holdfast"}, 3e-4, {"train": {"safety_batch_size": 1}})
    with pytest.raises(KeyError, match="rate"):
        barrier.parsed("sft")


def test_a_run_may_take_a_configuration_of_the_rounds():
    limits = {
        "refusals": {"unit": "kl_first", "tau": 0.02, "beta": 50.0, "majorizer": "capped_ramp"},
        "answers": {"unit": "kl_first", "first_k": 32}, "train": {"safety_batch_size": 1},
    }  # fmt: skip
    options = {
        "anchor": True, "metric": "adam_unit", "value_decay": 0.98, "reserve": 0.4, "dual": 0.2, "draw": "importance",
        "verify": 32,
    }  # fmt: skip
    found = barrier.parsed("holdfast config=drawn_1_wide dual=0.2 rate=1e-3")
    assert found == ({"name": "holdfast", **options}, 1e-3, limits)
    assert barrier.parsed("primal_dual config=drawn_1_wide rate=1e-3") == ({"name": "primal_dual"}, 1e-3, limits)


def test_a_run_has_limits_of_its_own_over_the_defaults():
    text = "holdfast refusals.majorizer=capped_ramp refusals.unit=kl_first refusals.tau=0.02 refusals.beta=50 rate=1e-3"
    defense, _, limits = barrier.parsed(text)
    assert defense == {"name": "holdfast"}
    screening: Any = SimpleNamespace(sets={"refusals": None, "answers": None}, counts={
        "refusals": {"keep": "refusals"}, "answers": {"keep": "answers"},
    })  # fmt: skip
    found = barrier.constraints(screening, limits)
    own = found["refusals"]
    assert (own.majorizer, own.tau, own.beta, own.unit) == ("capped_ramp", 0.02, 50, "kl_first")
    assert found["answers"] == barrier.constraints(screening, {})["answers"]
    for given in ({"tau": 0.02}, {"unit": "kl_token"}, {"majorizer": "capped_ramp"}, {"alpha": 0.2}):
        written: Any = {"constraint": {"refusals": given}}
        expected = config_from_dict({"model": "m", "task": "t.jsonl", "output_dir": "o"} | written).constraint
        mine = barrier.constraints(screening, {"refusals": given})["refusals"]
        assert mine == ChanceConstraint(**expected["refusals"]), given
    with pytest.raises(ConfigError, match="no set refusal"):
        barrier.constraints(screening, {"refusal": {"tau": 0.02}})


def test_a_run_in_another_precision_has_a_record_of_its_own():
    def place(dtype: str | None) -> str:
        given: Any = SimpleNamespace(output=Path("out"), model=Path("models/m"), seed=11, dtype=dtype)
        return barrier.place_of("holdfast reserve=0.2 rate=1e-3", given).as_posix()

    assert place(None) == "out/m.holdfast.reserve=0.2.rate=1e-3.s11.json"
    assert place("float32") == "out/m.holdfast.reserve=0.2.rate=1e-3.s11.float32.json"


def test_a_record_has_the_path_of_every_set(tmp_path):
    """A g that is not finite is stored as null, and counts as above zero."""
    rows = [
        {"step": 1, "loss": 2.0, "event": "inactive", "pulled": 1.0, "g": -0.05, "probe": {"refusals": -0.04}},
        {"step": 2, "loss": 1.0, "event": "active", "pulled": 0.9, "g": -0.02, "probe": {"refusals": None}},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = SimpleNamespace(
        evaluate=lambda: {"eval_loss": 0.5}, run=SimpleNamespace(engine=SimpleNamespace(name="two_pass")),
        state=SimpleNamespace(max_steps=7),
    )  # fmt: skip
    found = barrier.record_of(trainer, "holdfast rate=1e-3", tmp_path, 1.0)
    assert found["sets"] == {
        "refusals": {"steps": 2, "above": 0.5, "largest": None, "probe": [-0.04, None], "estimate": [-0.05, -0.02]}
    }
    assert (found["events"], found["pulled"], found["losses"]) == (
        {"inactive": 1, "active": 1}, [1.0, 0.9], [2.0, 1.0],
    )  # fmt: skip
    assert (found["held_out_loss"], found["steps"], found["planned_steps"]) == (0.5, 2, 7)


@pytest.mark.parametrize(
    ("path", "ends_at"),
    [
        ([-0.1, 0.01, -0.1, 0.01, -0.1], None),  # 2 of 40 steps are 5 %
        ([-0.1, 0.01, 0.001, 0.001, -0.1], 4),
        ([-0.1, 0.0101], 2),
        ([-0.1, float("nan")], 2),
    ],
)
def test_a_run_ends_once_it_cannot_hold(path, ends_at):
    control = SimpleNamespace(should_training_stop=False)
    trainer: Any = SimpleNamespace(state=SimpleNamespace(max_steps=40), control=control)
    lost, ended = barrier.Lost(trainer), None
    for step, g in enumerate(path, 1):
        lost({"step": step, "probe": {"refusals": -0.2, "answers": g}})
        ended = ended or (step if control.should_training_stop else None)
    assert ended == ends_at


def test_a_trainer_stops_at_the_step_that_loses(tmp_path, monkeypatch):
    trainer = build(tmp_path, given={"constraint": TIGHT}, probe_rows=5)
    monkeypatch.setattr(barrier, "LARGEST", -1.0)  # what every step exceeds
    trainer.step_listeners.append(barrier.Lost(trainer))
    trainer.train()
    assert trainer.state.global_step == 1 < trainer.state.max_steps
