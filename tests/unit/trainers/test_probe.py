"""g on fixed examples after every step: measured as the monitor measures, and without a trace in the training."""

from __future__ import annotations

import pytest
import torch
from tests.unit.trainers.building import TIGHT, build, same, weights

import holdfast as hf
from holdfast.constraint.draws import ImportanceDraws
from holdfast.core import event_log
from holdfast.core.errors import ConfigError
from holdfast.training.monitoring import barrier_figures, summarise
from holdfast.training.probe import ConstraintProbe, looked_at


def test_the_probe_is_in_every_row_and_changes_nothing(tmp_path):
    plain = build(tmp_path / "a", given={"constraint": TIGHT})
    plain.train()
    probed = build(tmp_path / "b", given={"constraint": TIGHT}, probe_rows=5)
    probed.train()
    assert same(weights(plain), weights(probed))
    rows = event_log.read(tmp_path / "b" / "run" / "events.jsonl")
    assert [list(row["probe"]) for row in rows] == [["safety"]] * 3
    assert "probe" not in event_log.read(tmp_path / "a" / "run" / "events.jsonl")[0]
    assert rows[-1]["probe"] == ConstraintProbe(probed.run, 5).measure()


def test_a_probe_of_all_rows_is_g_of_the_constraint_split(tmp_path):
    trainer = build(tmp_path, given={"constraint": TIGHT}, probe_rows=1000)
    trainer.train()
    expected = float(TIGHT.value(trainer.degradations("safety", "constraint")))
    assert ConstraintProbe(trainer.run, 1000).measure()["safety"] == pytest.approx(expected, rel=1e-6)
    assert expected > TIGHT.start_value(), "training moved it"


def test_the_probe_of_a_kl_passes_over_theta_0_once(tmp_path, monkeypatch):
    kl = hf.ChanceConstraint(tau=1e-3, beta=1e3, unit="kl_token")
    trainer = build(tmp_path, given={"constraint": kl}, probe_rows=1000)
    trainer.train()
    expected = float(kl.value(trainer.degradations("safety", "constraint")))
    probe = ConstraintProbe(trainer.run, 1000)
    assert probe.measure()["safety"] == pytest.approx(expected, rel=1e-4)
    assert expected > kl.start_value(), "training moved it"
    monkeypatch.setattr(trainer.run.theta_0, "active", pytest.fail)
    assert probe.measure()["safety"] == pytest.approx(expected, rel=1e-4)


def test_the_probe_of_cvar_has_the_threshold_of_its_own_rows(tmp_path):
    cvar = hf.ChanceConstraint(tau=0.05, majorizer="cvar", allow_infeasible_start=True, unit="nll_token")
    trainer = build(tmp_path, given={"constraint": cvar}, probe_rows=1000)
    trainer.train()
    expected = summarise(trainer.degradations("safety", "constraint"), trainer.safety["safety"])["g"]
    assert ConstraintProbe(trainer.run, 1000).measure()["safety"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("unit", ["kl_token", "kl_first", "nll_token"])
@pytest.mark.parametrize("step", ["fused", "two_pass"])
def test_a_look_at_some_rows_is_what_the_monitor_measures_of_them(tmp_path, monkeypatch, step, unit):
    """Also a few rows at a time, and where the reference's states are not kept."""
    constraint = hf.ChanceConstraint(tau=1e-3, beta=1e3, unit=unit, allow_infeasible_start=True)
    trainer = build(tmp_path, given={"constraint": constraint}, step=step, learning_rate=0.05)
    trainer.train()
    monkeypatch.setattr("holdfast.training.probe.PROBED", 2)
    places = [3, 0, 5, 4, 1]
    found = looked_at(trainer.run, "safety", places)
    expected = trainer.degradations("safety", "constraint")[places]
    assert expected.abs().max() > 1e-3, "training moved it"
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    if step == "fused":
        monkeypatch.setattr(vars(trainer.run.engine)["joint"], "kept", None)
        torch.testing.assert_close(looked_at(trainer.run, "safety", places), expected, rtol=1e-3, atol=1e-5)


def test_rows_that_are_looked_at_are_drawn_anew_at_every_step(tmp_path):
    trainer = build(tmp_path, given={"constraint": TIGHT})
    data, size = trainer.run.data, len(trainer.safety["safety"].constraint_set)
    index, _, weights = data.look("safety", 4, None)
    assert weights is None
    assert len(set(index.tolist())) == 4
    assert torch.equal(data.look("safety", 4, None)[0], index)
    trainer.state.global_step = 1
    assert not torch.equal(data.look("safety", 4, None)[0], index)
    assert sorted(data.look("safety", 1000, None)[0].tolist()) == list(range(size))


def test_rows_that_are_looked_at_by_importance_come_with_weights(tmp_path):
    """Half of the draws go to the one row that moved; of a row that comes up twice the figures do too."""
    trainer = build(tmp_path, given={"constraint": TIGHT})
    draws = ImportanceDraws(len(trainer.safety["safety"].constraint_set))
    draws.seen[:] = 0.0
    draws.seen[2] = 1.0
    index, found, weights = trainer.run.data.look("safety", 8, draws)
    assert index.tolist().count(2) >= 4
    expected = trainer.degradations("safety", "constraint")[index]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weights, 1.0 / (len(draws.seen) * draws.probabilities()[index]))


def test_fewer_than_no_rows_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="probe_rows is -1"):
        build(tmp_path, probe_rows=-1)


def test_figures_of_a_run():
    rows = [
        {"step": 1, "loss": 1.0, "event": "inactive", "probe": {"refusals": -0.02, "answers": 0.01}},
        {"step": 2, "loss": 1.0, "event": "active", "probe": {"refusals": 0.005, "answers": None}},
        {"step": 2, "behaviour": {}},
        {"step": 3, "loss": 1.0, "event": "active"},
    ]
    assert barrier_figures(rows) == {
        "events": {"inactive": 1, "active": 2},
        "probe": {
            "refusals": {"steps": 2, "above": 0.5, "largest": 0.005},
            "answers": {"steps": 2, "above": 1.0, "largest": None},
        },
    }
    assert barrier_figures([{"step": 1, "loss": 1.0}]) == {"events": {}}
