"""The monitor split in evaluations: present, logged, usable for choosing and stopping, and without side effects."""

from __future__ import annotations

import pytest
import torch
from tests import tiny
from tests.unit.trainers.building import TIGHT, arguments, build, deep, same, weights
from transformers import EarlyStoppingCallback, TrainerCallback
from trl import SFTConfig

import holdfast as hf
from holdfast.core.errors import ConfigError
from holdfast.training.monitoring import quantiles

RATE = "eval_safety_violation_rate"
EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}


def held_out():
    return tiny.dataset(6, seed=8, start="w1")


def test_task_and_monitor_figures_appear_together(tmp_path):
    trainer = build(tmp_path, given={"eval_dataset": held_out()}, **EVERY_STEP)
    trainer.train()
    found = trainer.evaluate()
    assert found[RATE] == 0.0
    assert found["eval_loss"] > 0
    assert {"eval_safety_violation_upper", "eval_safety_g", "eval_safety_cvar", "eval_safety_n"} <= found.keys()
    logged = [row for row in trainer.state.log_history if RATE in row]
    assert [row["step"] for row in logged] == [1, 2, 3, 3]
    assert all("eval_loss" in row for row in logged)


def test_without_a_task_set_the_monitor_split_is_evaluated_alone(tmp_path):
    trainer = build(tmp_path, **EVERY_STEP)
    trainer.train()
    found = trainer.evaluate()
    assert RATE in found
    assert "eval_loss" not in found
    assert [row["step"] for row in trainer.state.log_history if RATE in row] == [1, 2, 3, 3]


def test_several_task_sets(tmp_path):
    trainer = build(tmp_path, given={"eval_dataset": {"first": held_out(), "second": held_out()}}, **EVERY_STEP)
    found = trainer.evaluate()
    assert {"eval_first_loss", "eval_second_loss", RATE} <= found.keys()
    assert not any("first_safety" in key or "second_safety" in key for key in found)


def test_figures_are_those_of_the_degradations(tmp_path):
    trainer = deep(tmp_path, given={"defense": "sft", "constraint": TIGHT}, max_steps=6, learning_rate=2e-2)
    trainer.train()
    d = trainer.degradations()
    found = trainer.safety_metrics()
    assert len(d) == found["eval_safety_n"] == 4
    assert found[RATE] == sum(x > TIGHT.tau for x in d.tolist()) / 4 > 0
    ramp = [max(1 + TIGHT.beta * (x - TIGHT.tau), 0.0) for x in d.tolist()]
    assert found["eval_safety_g"] == pytest.approx(sum(ramp) / 4 - TIGHT.alpha)
    assert len(trainer.degradations(role="constraint")) == 12
    assert quantiles(d)["max"] == max(d.tolist())


@pytest.mark.parametrize("given", [{}, {"eval_dataset": "held out"}], ids=["monitor only", "with a task set"])
def test_evaluating_does_not_change_the_trajectory(tmp_path, given):
    given = {"eval_dataset": held_out()} if given else {}
    options = {"max_steps": 4, "gradient_accumulation_steps": 2}
    given |= {"constraint": TIGHT, "peft_config": tiny.lora(0.2)}
    looking = build(tmp_path / "a", given=given, **options, **EVERY_STEP)
    looking.train()
    blind = build(tmp_path / "b", given={k: v for k, v in given.items() if k != "eval_dataset"}, **options)
    blind.train()
    assert same(weights(looking), weights(blind))


class Script(TrainerCallback):
    """Moves the adapter to a scripted size after each step, so that the violation rate follows a script."""

    def __init__(self, sizes):
        self.sizes = sizes

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **_):
        draw = torch.Generator().manual_seed(3)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(self.sizes[state.global_step - 1] * torch.randn(p.shape, generator=draw))


CHOOSING = {
    "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": RATE,
    "learning_rate": 1e-9, "max_steps": 4,
} | EVERY_STEP  # fmt: skip


def test_the_safest_checkpoint_is_kept(tmp_path):
    given = {"callbacks": [Script([1.0, 1e-4, 2.0, 3.0])], "defense": "sft", "constraint": TIGHT}
    trainer = build(tmp_path, given=given, save_total_limit=1, **CHOOSING)
    assert trainer.args.greater_is_better is False
    trainer.train()
    rates = [row[RATE] for row in trainer.state.log_history if RATE in row]
    assert rates[1] < min(rates[0], *rates[2:])
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert max(float(p.detach().abs().max()) for name, p in trainer.model.named_parameters() if "lora_B" in name) < 1e-2
    assert trainer.evaluate()[RATE] == rates[1]


def test_early_stopping_on_the_violation_rate(tmp_path):
    given = {
        "callbacks": [Script([1e-4, 1.0, 2.0, 3.0]), EarlyStoppingCallback(early_stopping_patience=2)],
        "defense": "sft", "constraint": TIGHT,
    }  # fmt: skip
    trainer = build(tmp_path, given=given, **CHOOSING)
    trainer.train()
    assert trainer.state.global_step == 3
    assert trainer.state.best_global_step == 1


def test_keeping_the_least_safe_checkpoint_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="least safe checkpoint") as caught:
        arguments(tmp_path, **CHOOSING, greater_is_better=True)
    assert caught.value.exit_code == 2


def test_direction_of_metrics(tmp_path):
    """A plain SFTConfig arrives with transformers' guess, which is the wrong way round for safety figures."""
    plain = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, **CHOOSING)
    assert plain.greater_is_better is True
    assert hf.SafeSFTConfig.from_sft(plain).greater_is_better is False
    for metric in ("eval_safety_refusal_violation_upper", "eval_safety_g", "eval_safety_cvar"):
        assert arguments(tmp_path, **{**CHOOSING, "metric_for_best_model": metric}).greater_is_better is False
    for metric in ("eval_gsm8k_accuracy", "eval_mean_token_accuracy"):
        assert arguments(tmp_path, **{**CHOOSING, "metric_for_best_model": metric}).greater_is_better is True
