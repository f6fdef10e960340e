"""SaLoRA: what it refuses, what it keeps, and the adapter of twice the rank."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from peft import PeftModel
from tests import hybrid, tiny
from tests.unit.trainers.building import build, deep, same, weights

from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.models.lora_layers import lora_layers
from holdfast.training.hooks import make_defense
from holdfast_lab.defenses import salora
from holdfast_lab.defenses.salora import Salora, outside, task_rows

SMALL = {"name": "salora", "safety_rank": 3, "task_rank": 3}
ADAMW = {"optim": "adamw_torch", "weight_decay": 0.1}


@pytest.mark.parametrize("option", ["safety_rank", "task_rank", "calibration"])
def test_settings_below_one_are_refused(option):
    with pytest.raises(ConfigError, match=f"{option} is 0"):
        make_defense({"name": "salora", option: 0})


def test_defaults_are_the_authors():
    assert dataclasses.asdict(Salora.Config()) == {"safety_rank": 32, "task_rank": 32, "calibration": 128}
    assert Salora.off is None
    assert Salora.paper == {}


def refusal(folder, error=UnsupportedError, **kwargs):
    options = kwargs.pop("options", {})
    with pytest.raises(error) as caught:
        build(folder, given={"defense": SMALL, **kwargs}, **options)
    return caught.value.what


@pytest.mark.parametrize(
    ("option", "value", "limit"), [("safety_rank", 16, 15), ("task_rank", 17, 16)], ids=["safety_rank", "task_rank"]
)
def test_ranks_beyond_a_module_are_refused_by_its_name(tmp_path, option, value, limit):
    what = refusal(tmp_path, ConfigError, defense={**SMALL, option: value})
    assert f"{option} is {value}; model.layers.0.self_attn.k_proj (16 x 32) allows at most {limit}" in what


def test_a_lora_rank_beyond_a_module_is_refused(tmp_path):
    config = tiny.lora()
    config.r = 17
    assert "LoRA's rank is 17" in refusal(tmp_path, ConfigError, peft_config=config)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"peft_config": None}, "no adapter"),
        ({"peft_config": tiny.lora(use_dora=True)}, "DoRA"),
        ({"peft_config": tiny.lora(alora_invocation_tokens=[3])}, "variant of LoRA"),
        ({"peft_config": tiny.lora(init_lora_weights=False)}, "already changes the model"),
        ({"train_dataset": tiny.dataset(12, seed=1, start="w1").to_iterable_dataset()}, "is a stream"),
        ({"options": {"packing": True, "packing_strategy": "wrapped"}}, "packed"),
    ],
    ids=["full", "dora", "alora", "started", "stream", "packed"],
)
def test_unsupported_runs_are_refused(tmp_path, changes, word):
    assert word in refusal(tmp_path, **changes)


@pytest.mark.parametrize("optim", ["adafactor", "stable_adamw"])
def test_optimizers_that_look_at_whole_matrices_are_refused(tmp_path, optim):
    """Six steps of Adafactor on C B end 15 % away from those on B."""
    assert f"optimizer {optim}" in refusal(tmp_path, options={"optim": optim})


def test_an_optimizer_made_before_is_refused(tmp_path):
    model = tiny.model(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert "already holds" in refusal(tmp_path, model=model, optimizers=(optimizer, None))


def test_outside_is_a_symmetric_idempotent_projection_of_rank_d_minus_r():
    v = torch.linalg.qr(torch.randn(11, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    c = outside(v, torch.eye(11, dtype=torch.float64))
    torch.testing.assert_close(c, c.T)
    torch.testing.assert_close(c @ c, c)
    assert int(torch.linalg.matrix_rank(c)) == 7
    assert float((v.T @ c).abs().max()) < 1e-14


def test_task_rows_are_a_seeded_draw_with_the_labels_that_training_scores(tmp_path):
    trainer = build(tmp_path, given={"defense": "sft"})
    found = task_rows(trainer.run, 5)
    stored = {(tuple(row["input_ids"]), tuple(row["labels"])) for row in trainer.train_dataset}
    assert len({row.input_ids for row in found}) == 5
    assert all((row.input_ids, row.labels) in stored for row in found)
    assert all(row.labels[0] == -100 and row.labels[-1] == row.input_ids[-1] for row in found)
    assert task_rows(trainer.run, 5) == found
    trainer.args.data_seed = trainer.args.seed = 99
    assert task_rows(trainer.run, 5) != found
    assert len(task_rows(trainer.run, 500)) == len(trainer.train_dataset)


def test_calibration_limits_both_sweeps(tmp_path, monkeypatch):
    seen, moments = [], salora.reply_moments
    monkeypatch.setattr(
        salora, "reply_moments", lambda run, layers, rows: seen.append(rows) or moments(run, layers, rows)
    )
    trainer = build(tmp_path, given={"defense": {**SMALL, "calibration": 5}})
    safe, task = seen
    assert len(safe) == len(task) == 5
    assert {row.id for row in safe} < {row.id for row in trainer.run.data.safe}
    assert all(row.id.startswith("task") for row in task)


def test_few_safe_tokens_protect_what_they_span_and_say_so(tmp_path, caplog):
    """Every reply is the same word: the first block sees two reply tokens, the word and the end."""
    rows = [{**row, "completion": "w3"} for row in tiny.rows(20, seed=2)]
    trainer = deep(tmp_path, given={"defense": {**SMALL, "safety_rank": 6}, "safety_dataset": rows})
    counts = {name: v.shape[1] for name, v in trainer.defense._directions.items()}  # type: ignore[attr-defined]
    assert {name: n for name, n in counts.items() if "layers.0" in name} == dict.fromkeys(
        (f"model.layers.0.self_attn.{p}_proj" for p in "qkv"), 2
    )
    assert {n for name, n in counts.items() if "layers.1" in name} == {6}
    assert "fewer than 6 output directions in 3 of 6 modules" in caplog.text


def test_fixed_halves_stay_bit_for_bit_and_the_rest_moves(tmp_path):
    trainer = build(tmp_path, given={"defense": SMALL}, **ADAMW)
    before = weights(trainer)
    trainer.train()
    for name, after in weights(trainer).items():
        first, second = (before[name], after) if ".lora_A." in name else (before[name].T, after.T)
        assert torch.equal(first[4:], second[4:]), name
        assert not torch.equal(first[:4], second[:4]), name


def test_weights_directions_and_steps_survive_a_resume(tmp_path):
    options = {**ADAMW, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    given = {"defense": SMALL, "peft_config": tiny.lora(0.1)}
    whole = build(tmp_path / "a", given=given, **options)
    whole.train()
    stopped = build(tmp_path / "b", given=given, **options)
    stopped.add_callback(stop_after(2))
    stopped.train()
    again = build(tmp_path / "b", given=given, **options)
    kept = dict(again.defense._directions)  # type: ignore[attr-defined]
    for name, v in kept.items():  # as on a machine whose calibration rounds differently
        again.defense._directions[name] = torch.zeros_like(v)  # type: ignore[attr-defined]
    again.train(resume_from_checkpoint=True)
    assert all(torch.equal(again.defense._directions[name], v) for name, v in kept.items())  # type: ignore[attr-defined]
    assert same(weights(whole), weights(again))


def stop_after(step):
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = control.should_training_stop or state.global_step >= step

    return Stop()


def test_training_goes_on_in_a_second_call(tmp_path):
    trainer = build(tmp_path, given={"defense": SMALL}, **ADAMW)
    trainer.train()
    first = weights(trainer)
    trainer.train()
    assert not same(first, weights(trainer))
    for layer in lora_layers(trainer.model, defense="salora"):
        v = trainer.defense._directions[layer.name]  # type: ignore[attr-defined]
        assert float((v.T @ layer.B.detach()).abs().max()) < 1e-6


def test_the_reference_is_the_base_and_the_global_random_state_is_untouched(tmp_path):
    ids = torch.arange(7, 20).reshape(1, -1)
    trainer = build(tmp_path / "a", given={"defense": SMALL})
    state = torch.get_rng_state()
    assert trainer.model.peft_config["default"].r == 8
    build(tmp_path / "b", given={"defense": "sft"})
    assert torch.equal(state, torch.get_rng_state())
    trainer.train()
    with trainer.run.theta_0.active(), torch.no_grad():
        assert torch.equal(trainer.model.eval()(ids).logits, tiny.model(layers=1)(ids).logits)


def test_a_hybrid_model_adapts_both_kinds_of_attention(tmp_path):
    model = hybrid.model()
    trainer = build(tmp_path, given={"defense": SMALL, "model": model, "peft_config": hybrid.lora()}, max_steps=2)
    names = {name.rsplit(".", 1)[1] for name in trainer.defense._directions}  # type: ignore[attr-defined]
    assert names == {"q_proj", "k_proj", "v_proj", "in_proj_qkv"}
    ids = torch.arange(7, 20).reshape(1, -1)
    with torch.no_grad():
        torch.testing.assert_close(trainer.model.eval()(ids).logits, hybrid.model()(ids).logits, rtol=1e-4, atol=1e-4)
    trainer.train()
    for layer in lora_layers(trainer.model, defense="salora"):
        v = trainer.defense._directions[layer.name]  # type: ignore[attr-defined]
        assert float((v.T @ layer.B.detach()).abs().max()) < 1e-6


@pytest.mark.parametrize(
    "more", [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}}],
    ids=["plain", "rslora", "patterns"],
)  # fmt: skip
def test_a_wider_adapter_reloads_as_an_ordinary_one(tmp_path, more):
    config, ids = tiny.lora(**more), torch.arange(7, 20).reshape(1, -1)
    trainer = build(tmp_path, given={"defense": SMALL, "peft_config": config}, max_steps=2)
    scaling = {layer.name: layer.scaling for layer in lora_layers(trainer.model, defense="salora")}
    assert config.r == 4  # the caller's own settings are another run's too
    assert scaling["model.layers.0.self_attn.q_proj"] == (8 / 2 if more.get("use_rslora") else 3 / 2 if more else 2)
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    loaded = PeftModel.from_pretrained(tiny.model(layers=1), tmp_path / "out")
    found = {layer.name: (layer.scaling, layer.A.shape[0]) for layer in lora_layers(loaded, defense="salora")}
    for name, (s, r) in found.items():
        assert s == pytest.approx(scaling[name], rel=1e-12)
        assert r == (4 if "q_proj" in name and "rank_pattern" in more else 8)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, trainer.model.eval()(ids).logits, rtol=1e-5, atol=1e-5)
