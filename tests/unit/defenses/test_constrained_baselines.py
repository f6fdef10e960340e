"""`mean_constraint`, `penalty` and `primal_dual`: refusals, rows, several safety sets, numbers that are none."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from tests import tiny
from tests.unit.trainers.building import SLACK, TIGHT, build, same, weights

import holdfast as hf
from holdfast.cli.progress import describe_row
from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.core.event_log import read
from holdfast.reporting.training import course
from holdfast.training.hooks import make_defense
from holdfast.training.side_pass import may_share_backward

SEVERAL = {"mild": tiny.dataset(8, seed=2), "strict": tiny.dataset(8, seed=3, start="w2")}
# c of the unchanged model is 0.05 in both: below the one alpha, above the other.
CONSTRAINTS = {
    "mild": hf.ChanceConstraint(tau=0.5, beta=1.9, alpha=0.5, unit="nll_token"),
    "strict": hf.ChanceConstraint(tau=0.5, beta=1.9, alpha=0.02, allow_infeasible_start=True, unit="nll_token"),
}
FRACTIONS = {"safety_fractions": (1.0, 0.0, 0.0)}


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"name": "mean_constraint", "epsilon": -0.1}, "epsilon is -0.1"),
        ({"name": "mean_constraint", "epsilon": math.nan}, "epsilon is nan"),
        ({"name": "mean_constraint", "epsilon": math.inf}, "epsilon is inf"),
        ({"name": "mean_constraint", "rate": 0.0}, "rate is 0.0"),
        ({"name": "mean_constraint", "estimator": "median"}, "unknown estimator 'median'"),
        ({"name": "penalty", "weight": -1.0}, "weight is -1.0"),
        ({"name": "penalty", "weight": math.inf}, "weight is inf"),
        ({"name": "penalty", "term": "tail"}, "term is 'tail'"),
        ({"name": "primal_dual", "start": -1.0}, "start is -1.0"),
        ({"name": "primal_dual", "dual_rate": math.nan}, "dual_rate is nan"),
        ({"name": "primal_dual", "warmup_epochs": -1}, "warmup_epochs is -1"),
        ({"name": "primal_dual", "cap": 0.0, "start": 0.0}, "cap is 0.0"),
        ({"name": "primal_dual", "cap": 1.0, "start": 2.0}, "not below start (2)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_out_of_range_are_refused(options, what):
    with pytest.raises(ConfigError) as caught:
        make_defense(options)
    assert what in caught.value.what
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["mean_constraint", "penalty", "primal_dual"])
def test_weights_in_bfloat16_are_refused(tmp_path, name):
    given = {"defense": name, "model": tiny.model(layers=1, dtype=torch.bfloat16), "peft_config": None}
    with pytest.raises(UnsupportedError) as caught:
        build(tmp_path, given=given)
    assert "trainable parameters in bfloat16" in caught.value.what


def trained(folder, defense, constraint=TIGHT, **given):
    trainer = build(folder, given={"defense": defense, "constraint": constraint, **given}, max_steps=2, **FRACTIONS)
    trainer.train()
    return trainer, read(trainer.run_dir / "events.jsonl")


@pytest.mark.parametrize("name", ["mean_constraint", "penalty", "primal_dual"])
def test_rows_feed_progress_and_report(tmp_path, name):
    _, rows = trained(tmp_path, name)
    found = course(rows, "safety")
    assert found.constrained
    assert sum(found.counts.values()) == len(rows)  # every event is known to the report
    assert describe_row(rows[-1]).startswith("g ")
    assert ("multiplier" in rows[-1]) == (name != "penalty")


def test_every_safety_set_has_its_own_multiplier(tmp_path):
    defense = {"name": "primal_dual", "start": 0.1, "dual_rate": 1.0}
    trainer, rows = trained(tmp_path, defense, CONSTRAINTS, safety_dataset=SEVERAL)
    assert rows[0]["constraints"]["mild"]["multiplier"] == rows[0]["constraints"]["strict"]["multiplier"] == 0.1
    assert rows[1]["constraints"]["mild"]["multiplier"] == 0.0
    assert rows[1]["constraints"]["strict"]["multiplier"] == pytest.approx(0.13, abs=1e-5)
    assert rows[1]["event"] == "active"
    assert set(trainer.defense.state_dict()["duals"]) == {"mild", "strict"}


def test_the_penalties_of_several_safety_sets_add_up(tmp_path):
    """One SGD step: the shifts of the single sets sum to that of both."""
    options = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, **FRACTIONS}
    ends = {}
    for name, defense, sets in [
        ("sft", "sft", SEVERAL),
        ("both", "penalty", SEVERAL),
        *[(key, "penalty", {key: value}) for key, value in SEVERAL.items()],
    ]:
        given = {"defense": defense, "safety_dataset": sets, "constraint": SLACK}
        trainer = build(tmp_path / name, given=given, **options)
        trainer.train()
        ends[name] = weights(trainer)
    for key, theta in ends["sft"].items():
        single = (ends["mild"][key] - theta) + (ends["strict"][key] - theta)
        torch.testing.assert_close(ends["both"][key] - theta, single, rtol=1e-4, atol=1e-6)
    assert not same(ends["sft"], ends["both"])


def test_a_penalty_of_weight_zero_is_sft_and_still_measures(tmp_path):
    plain, _ = trained(tmp_path / "a", "sft", SLACK, peft_config=tiny.lora(0.2))
    trainer, rows = trained(tmp_path / "b", {"name": "penalty", "weight": 0.0}, SLACK, peft_config=tiny.lora(0.2))
    assert same(weights(plain), weights(trainer))
    assert [row["event"] for row in rows] == ["inactive", "inactive"]
    assert rows[1]["penalty"] != 0.0


def test_a_degradation_that_is_no_number_leaves_the_task_step_alone(tmp_path):
    """The safety rows' reference is spoiled after it was measured, so every D is NaN."""
    choices = [
        {"name": "sft"},
        {"name": "primal_dual"},
        {"name": "primal_dual", "single_backward": False},
        {"name": "penalty"},
        {"name": "penalty", "term": "majorizer"},
    ]
    plain = None
    for number, defense in enumerate(choices):
        trainer = build(tmp_path / str(number), given={"defense": defense, "constraint": SLACK}, max_steps=2)
        trainer.safety["safety"].constraint_reference.fill_(math.nan)
        trainer.train()
        plain = plain or weights(trainer)
        assert same(plain, weights(trainer)), defense
        rows = read(trainer.run_dir / "events.jsonl")
        if defense["name"] != "sft":
            assert [(row["event"], row["g"]) for row in rows] == [("nonfinite", None)] * 2
        if defense["name"] == "primal_dual":
            assert trainer.defense.state_dict()["duals"]["safety"]["mu"] == 1.0


def test_reaching_the_cap_is_said_once(tmp_path, caplog):
    constraint = hf.ChanceConstraint(tau=0.5, beta=1.9, alpha=0.02, allow_infeasible_start=True, unit="nll_token")
    defense = {"name": "primal_dual", "cap": 1.05, "dual_rate": 100.0}
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        trainer, rows = trained(tmp_path, defense, constraint)
    assert [row["multiplier"] for row in rows] == [1.0, 1.05]
    assert rows[0]["event"] == "capped"
    assert trainer.defense.state_dict()["duals"]["safety"]["mu"] <= 1.05
    assert len([record for record in caplog.records if "reached its cap of 1.05" in record.message]) == 1


@pytest.mark.parametrize("attribute", ["attention_dropout", "dropout"])
def test_dropout_without_a_module_rules_a_joint_backward_out(tmp_path, attribute):
    """Attention and some layers hold a mere rate; under checkpointing it would be on again in the backward."""
    model = tiny.model(layers=1)
    trainer = build(tmp_path, given={"model": model, "defense": "primal_dual"}, gradient_checkpointing=True)
    assert may_share_backward(trainer.model, trainer.args)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            setattr(module, attribute, 0.1)
    assert not may_share_backward(trainer.model, trainer.args)
    trainer.args.gradient_checkpointing = False
    assert may_share_backward(trainer.model, trainer.args)
