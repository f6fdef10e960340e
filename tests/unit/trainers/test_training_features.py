"""TRL's features under an active filter: precision, packing, accumulation, all weights, other optimizers."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests import tiny
from tests.unit.trainers.building import TIGHT, build, deep, same, weights

import holdfast as hf
from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.core.event_log import read
from holdfast.core.units import KL_UNITS, UNITS
from holdfast.scoring.head import Head

NOISY = hf.ChanceConstraint(tau=0.01, beta=100.0, allow_tau_below_noise=True, unit="nll_token")


class Lion(torch.optim.Optimizer):
    """Betas, a momentum, and no second moment."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.sub_(group["lr"] * (group["betas"][0] * m + (1 - group["betas"][0]) * p.grad).sign())
                    m.lerp_(p.grad, 1 - group["betas"][1])


def trained(folder, constraint=TIGHT, **kwargs):
    """A short run, its rows, and the proof that it moved."""
    given = {"constraint": constraint, **kwargs.pop("given", {})}
    trainer = build(folder, given=given, **{"max_steps": 6, **kwargs})
    before = weights(trainer)
    trainer.train()
    assert not same(before, weights(trainer))
    rows = read(trainer.run_dir / "events.jsonl")
    assert len(rows) == 6
    return trainer, rows


def assert_barrier_holds(rows):
    """Corrected steps that no trust region cut satisfy the inequality; and there are some."""
    active = [row for row in rows if row["event"] == "active"]
    assert active
    assert all(row["residual"] <= 1e-6 for row in active)
    assert all(row["multiplier"] > 0 for row in active)


VARIANTS = {
    "accumulation": {"gradient_accumulation_steps": 3},
    "checkpointing": {"gradient_checkpointing": True},
    "clipping and decay": {"max_grad_norm": 0.1, "weight_decay": 0.1},
    "micro-batches": {"safety_batch_size": 6, "safety_micro_batch_size": 4},
    "neftune": {"neftune_noise_alpha": 5.0},
    "sgd": {"optim": "sgd", "learning_rate": 0.1},
    "dft loss": {"loss_type": "dft"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_filter_runs_with(tmp_path, name):
    _, rows = trained(tmp_path, **VARIANTS[name])
    assert_barrier_holds(rows)


def test_all_weights(tmp_path):
    trainer, rows = trained(tmp_path, given={"peft_config": None})
    assert len(weights(trainer)) == len(list(trainer.model.parameters()))
    assert_barrier_holds(rows)


def test_bf16_autocast_over_a_float32_base(tmp_path):
    trainer, rows = trained(tmp_path, NOISY, bf16=True)
    assert trainer.safety["safety"].reference.provenance["autocast"] == "bf16"
    assert_barrier_holds(rows)
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())


def test_bf16_base_with_float32_adapters(tmp_path):
    trainer, rows = trained(tmp_path, NOISY, given={"model": tiny.model(layers=1, dtype=torch.bfloat16)}, bf16=True)
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in trainer.model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert_barrier_holds(rows)


def test_trainable_bf16_weights_are_refused(tmp_path):
    given = {"model": tiny.model(layers=1, dtype=torch.bfloat16), "peft_config": None, "constraint": NOISY}
    with pytest.raises(UnsupportedError, match="trainable parameters in bfloat16") as caught:
        build(tmp_path, given=given)
    assert "float32" in caught.value.remedy
    assert not list(tmp_path.rglob("reference.*"))  # refused before anything was measured


def test_lion_gets_the_identity_metric(tmp_path):
    lion = {"optimizer_cls_and_kwargs": (Lion, {"lr": 1e-2})}
    trainer, rows = trained(tmp_path, given=lion)
    assert trainer.defense._filter.metric == "identity"
    assert_barrier_holds(rows)
    refused = build(tmp_path / "b", given={**lion, "defense": {"name": "holdfast", "metric": "adam"}})
    with pytest.raises(ConfigError, match="Lion has none"):
        refused.train()


def test_adam_gets_its_own_metric(tmp_path):
    trainer, _ = trained(tmp_path)
    assert trainer.defense._filter.metric == "adam"


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_an_8bit_optimizer_without_its_package_says_so(tmp_path):
    trainer = build(tmp_path, optim="adamw_bnb_8bit")
    with pytest.raises(ImportError, match="bitsandbytes"):
        trainer.train()


@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_steers(tmp_path, unit):
    tau = 1e-3 if unit in KL_UNITS else 0.01  # KL is quadratic at the start: six steps make little of it
    trainer, rows = trained(tmp_path, hf.ChanceConstraint(tau=tau, beta=1 / tau, unit=unit))
    assert trainer.safety["safety"].noise_floor < 1e-4
    assert_barrier_holds(rows)
    assert any(row["multiplier"] > 0 for row in rows)


def test_dropout_leaves_the_first_step_at_zero_degradation(tmp_path):
    _, rows = trained(tmp_path, given={"peft_config": tiny.lora(0.5)})
    assert rows[0]["g"] == pytest.approx(-TIGHT.alpha, abs=1e-3)  # phi(-tau) = 0 at theta_0
    assert rows[0]["violation_rate"] == 0.0


def test_gradient_space_and_batch_estimates(tmp_path):
    defense = {"name": "holdfast", "space": "gradient", "estimator": "batch", "rate": 1.0}
    trainer, rows = trained(tmp_path, given={"defense": defense}, optim="sgd", learning_rate=0.1)
    assert {row["event"] for row in rows} <= {"active", "inactive", "infeasible"}
    assert any(row["multiplier"] > 0 for row in rows)
    assert trainer.defense.describe()["space"] == "gradient"


def test_the_filter_protects(tmp_path):
    """Same task, same steps: with the filter fewer safety examples get worse than without."""
    options = {"max_steps": 40, "learning_rate": 1e-2, "safety_batch_size": 12}
    limit = hf.ChanceConstraint(tau=0.1, alpha=0.25, beta=10.0, unit="nll_token")
    with_filter = deep(tmp_path / "a", given={"constraint": limit}, **options)
    without = deep(tmp_path / "b", given={"constraint": limit, "defense": "sft"}, **options)
    with_filter.train()
    without.train()
    kept = limit.violation_rate(with_filter.degradations(role="constraint"))
    lost = limit.violation_rate(without.degradations(role="constraint"))
    assert kept <= limit.alpha < lost


def test_losses_of_float32_weights_under_bfloat16_autocast_are_reused(tmp_path):
    """Another batch composition moves such losses by more than float32's tolerance; the table is still this model's."""
    build(tmp_path, given={"constraint": NOISY}, bf16=True)
    again = build(tmp_path, given={"constraint": NOISY}, bf16=True, safety_eval_batch_size=3)
    assert again.safety["safety"].reference is not None


def test_an_adapter_on_the_head_is_refused():
    """TRL refuses it too; measured on its own, the losses would silently leave the adapter out."""
    on_head = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(UnsupportedError, match="adapter on the output head"):
        Head(get_peft_model(tiny.model(layers=1), on_head))


@pytest.mark.parametrize(("steps", "warned"), [(1, True), (2, False)])
def test_a_run_whose_only_step_is_a_warm_up_step_is_warned_of(tmp_path, caplog, steps, warned):
    trainer = build(tmp_path, max_steps=steps, warmup_steps=0.03, lr_scheduler_type="cosine")
    before = weights(trainer)
    with caplog.at_level("WARNING"):
        trainer.train()
    assert ("nothing is trained" in caplog.text) == warned == same(before, weights(trainer))
