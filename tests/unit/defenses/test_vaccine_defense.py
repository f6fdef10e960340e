"""Vaccine beside its formulas: settings, refusals, checkpointing, precision, batches without a label."""

from __future__ import annotations

import math

import pytest
import torch
from tests import hybrid, tiny
from tests.unit.trainers.building import build, weights

from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.core.event_log import read
from holdfast.training.hooks import make_defense
from holdfast_lab.defenses import vaccine as module
from holdfast_lab.defenses.vaccine import Vaccine, hidden_gradients

MODELS = {"llama": tiny, "hybrid": hybrid}


def aligned(folder, kind="llama", *, rho=1.0, dropout=0.0, given=None, **options):
    source = MODELS[kind]
    chosen = {
        "model": source.model(), "peft_config": source.lora(dropout), "safety_dataset": None, "constraint": None,
        "defense": {"name": "vaccine", "rho": rho}, **(given or {}),
    }  # fmt: skip
    return build(folder, given=chosen, **{"stage": "align", "max_steps": 2, **options})


def test_defaults_and_preset():
    assert Vaccine().config.rho == 2.0
    assert make_defense({"name": "vaccine", "preset": "paper"}).describe() == {"name": "vaccine", "rho": 2.0}


@pytest.mark.parametrize("rho", [-1.0, math.nan, math.inf])
def test_radius_out_of_range(rho):
    with pytest.raises(ConfigError, match="rho is"):
        Vaccine.Config(rho=rho)


def test_another_stage_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="acts in the align stage"):
        aligned(tmp_path, stage="finetune")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"packing": True, "packing_strategy": "wrapped"}, "packing or padding_free"),
        ({"padding_free": True, "max_length": None}, "packing or padding_free"),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            "reentrant checkpointing",
        ),
        ({"loss_type": "dft"}, "a loss other than"),
        ({"label_smoothing_factor": 0.1}, "a loss other than"),
    ],
    ids=["packing", "padding_free", "reentrant", "dft", "label_smoothing"],
)
def test_unsupported_runs_are_refused(tmp_path, options, what):
    with pytest.raises(UnsupportedError, match=what):
        aligned(tmp_path, **options)


def test_own_losses_are_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="a loss other than"):
        aligned(tmp_path, given={"compute_loss_func": lambda *_, **__: None})


def test_models_without_token_mixers_are_refused(tmp_path):
    model = tiny.model(layers=1)
    model.config.num_hidden_layers = 7
    with pytest.raises(UnsupportedError, match="no list of 7 decoder blocks"):
        aligned(tmp_path, given={"model": model})


@pytest.mark.parametrize("kind", list(MODELS))
def test_checkpointing_changes_nothing(tmp_path, kind):
    """With the default keyword arguments, and with dropout: layers that run again get the same perturbation."""
    found = []
    for on in (False, True):
        trainer = aligned(
            tmp_path / str(on), kind, dropout=0.2, gradient_checkpointing=on, optim="sgd", learning_rate=0.5
        )
        start = weights(trainer)
        torch.manual_seed(5)
        trainer.train()
        found.append(weights(trainer))
    for name, theta in found[0].items():
        torch.testing.assert_close(found[1][name], theta, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(theta, start[name]) for name, theta in found[0].items())


def test_bf16_autocast_perturbs_in_the_outputs_own_precision(tmp_path, monkeypatch):
    dtypes, shifted = [], module.shifted  # type: ignore[attr-defined]

    def spying(mixers, shift):
        def spied(name, hidden):
            found = shift(name, hidden)
            dtypes.append((hidden.dtype, found.dtype))
            return found

        return shifted(mixers, spied)

    monkeypatch.setattr(module, "shifted", spying)
    trainer = aligned(tmp_path, bf16=True, max_steps=1)
    trainer.train()
    assert dtypes == [(torch.bfloat16, torch.bfloat16)] * 4
    assert math.isfinite(read(trainer.run_dir / "events.jsonl")[0]["hidden_gradient_norm"])


def test_full_weights_are_trained_too(tmp_path):
    trainer = aligned(tmp_path, given={"peft_config": None}, max_steps=1)
    before = weights(trainer)
    trainer.train()
    assert not torch.equal(weights(trainer)["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def test_a_batch_without_a_scored_token_is_left_alone(tmp_path):
    trainer = aligned(tmp_path)
    trainer.defense.attach(trainer.run)
    ids = torch.arange(7, 19).view(2, 6)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.full_like(ids, -100)}
    loss, found = hidden_gradients(trainer.run, trainer.defense._mixers, batch, 1.0)
    assert float(loss) == 0
    assert all((g == 0).all() for g in found.values())
    trainer.current_gradient_accumulation_steps = 1
    shift = []
    attention = trainer.model.get_base_model().model.layers[0].self_attn

    def accumulate(*_):
        assert len(attention._forward_hooks) == 1
        logits = trainer.model(input_ids=ids).logits
        shift.append(logits)
        return logits.sum().detach()

    trainer.run.engine.accumulate = accumulate
    trainer.model.eval()
    clean = trainer.model(input_ids=ids).logits
    assert torch.isfinite(trainer.defense.micro_step(trainer.run, batch, None))
    assert torch.equal(shift[0], clean)


def test_outputs_of_another_layout_are_refused(tmp_path):
    trainer = aligned(tmp_path)
    lm = trainer.model.get_base_model()
    ids = torch.arange(7, 19).view(2, 6)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    with pytest.raises(UnsupportedError, match=r"the output of rotary is \(1, 6, 8\)"):
        hidden_gradients(trainer.run, [("rotary", lm.model.rotary_emb)], batch, 1.0)


def test_hooks_go_when_the_backward_fails(tmp_path):
    trainer = aligned(tmp_path, max_steps=1)

    def fail(*_, **__):
        raise RuntimeError("no memory")

    trainer.accelerator.backward = fail
    with pytest.raises(RuntimeError, match="no memory"):
        trainer.train()
    attention = [m for n, m in trainer.model.named_modules() if n.endswith("self_attn")]
    assert len(attention) == 2
    assert not any(m._forward_hooks for m in attention)
    assert all(p.grad is None for p in trainer.model.parameters())


def test_the_row_is_of_the_whole_step(tmp_path):
    """Two micro-batches of two rows have the loss of one of four, and its gradient in the hidden states."""
    rows = []
    for each, micros in ((4, 1), (2, 2)):
        options = {"per_device_train_batch_size": each, "gradient_accumulation_steps": micros, "max_steps": 1}
        trainer = aligned(tmp_path / str(each), **options)
        trainer.train()
        rows.append(read(trainer.run_dir / "events.jsonl")[0])
    for key in ("unperturbed_loss", "hidden_gradient_norm"):
        assert rows[1][key] == pytest.approx(rows[0][key], rel=1e-5)
    assert rows[0]["loss"] != rows[0]["unperturbed_loss"]


def test_without_strength_the_row_is_empty():
    assert Vaccine(Vaccine.Config(rho=0.0)).row() == {}
