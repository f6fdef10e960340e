"""Antibody's settings, its refusals of what it cannot do, its rows and its state."""

from __future__ import annotations

import json
import math

import pytest
import torch
from datasets import Dataset
from tests import tiny
from tests.unit.trainers.building import build, same, weights

from holdfast.core.errors import ConfigError, DataError, UnsupportedError
from holdfast.core.event_log import read
from holdfast.training.hooks import make_defense
from holdfast_lab.defenses.antibody import Antibody

ALIGN = {"stage": "align", "max_steps": 4}


def made(folder, *, given=None, harmful=True, **options):
    passed = {"defense": "antibody", "safety_dataset": None, "constraint": None}
    if harmful:
        passed["harmful_dataset"] = tiny.dataset(10, seed=5, start="w2")
    return build(folder, given={**passed, **(given or {})}, **options)


def events(trainer):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in read(trainer.run_dir / "events.jsonl")]


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rho", 0.0), ("rho", math.inf), ("eta", -1.0), ("eta", math.nan), ("rule", "sine"), ("momentum", 1.0),
        ("momentum", -0.1), ("lam", -1.0), ("lambda_ref", -0.1), ("harmful_batch_size", 0), ("temperature", 0.0),
        ("temperature", math.nan),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(option, value):
    with pytest.raises(ConfigError, match=f"antibody: {option} is"):
        Antibody.Config(**{option: value})


def test_infinite_temperature_is_no_weighting_and_fits_into_json():
    assert Antibody.Config(temperature=math.inf) == Antibody.Config(temperature=None)
    described = Antibody(Antibody.Config(temperature=math.inf)).describe()
    assert json.loads(json.dumps(described, allow_nan=False))["temperature"] is None


@pytest.mark.parametrize(
    ("options", "momentum"),
    [({}, 0.99), ({"rule": "ratio"}, 0.0), ({"rule": "ratio", "momentum": 0.5}, 0.5), ({"momentum": 0.0}, 0.0)],
    ids=["cosine", "ratio", "ratio-asked", "cosine-without"],
)
def test_only_the_released_rule_averages_unless_asked(options, momentum):
    assert Antibody.Config(**options).smoothing == momentum


def test_the_papers_constants():
    config = make_defense({"name": "antibody", "preset": "paper"}).config
    assert (config.rho, config.lambda_ref, config.temperature) == (0.1, 1.0, 1.0)
    assert (config.eta, config.rule, config.smoothing) == (5.0, "cosine", 0.99)


def test_harmful_pairs_are_needed_in_alignment_only(tmp_path):
    with pytest.raises(ConfigError, match="needs harmful pairs"):
        made(tmp_path / "a", harmful=False, **ALIGN)
    trainer = made(tmp_path / "b")
    assert trainer.run.data.harmful == []
    assert Antibody.needed("finetune") == frozenset()


# -- what it refuses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"padding_free": True, "max_length": None}, "padding-free"),
        ({"packing": True, "packing_strategy": "wrapped"}, "packed"),
        ({"loss_type": "dft"}, "loss_type 'dft'"),
        ({"label_smoothing_factor": 0.1}, "label smoothing"),
        ({"truncation_mode": "keep_end"}, "keep_end"),
        ({"completion_only_loss": False}, "without a prompt"),
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}, "micro-batches of one row"),
    ],
    ids=["padding-free", "packing", "dft", "smoothing", "keep-end", "all-tokens", "one-row"],
)
def test_task_losses_it_cannot_weight_are_refused(tmp_path, options, words):
    with pytest.raises(UnsupportedError, match=words):
        made(tmp_path, harmful=False, **options)


def test_several_scored_replies_of_a_row_are_refused(tmp_path):
    """A refusal of the first would be compared with the mean over all."""
    words = tiny.tokenizer()
    words.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|> {% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] }} <|end|> {% endgeneration %}{% else %}{{ m['content'] }} <|end|> {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|> {% endif %}"
    )
    turns = [{"role": role, "content": f"w{i} w9"} for i, role in enumerate(("user", "assistant") * 2)]
    given = {"train_dataset": Dataset.from_list([{"messages": turns}] * 4), "processing_class": words}
    with pytest.raises(UnsupportedError, match="several replies of a row"):
        made(tmp_path, given=given, harmful=False, assistant_only_loss=True)


@pytest.mark.parametrize("defense", ["booster", "antibody"])
def test_a_harmful_step_that_cannot_be_made_is_refused_before_training(tmp_path, monkeypatch, defense):
    whole = {"defense": defense, "peft_config": None, "model": tiny.model(layers=1, dtype=torch.bfloat16)}
    with pytest.raises(UnsupportedError, match="trainable parameters in bfloat16"):
        made(tmp_path / "a", given=whole, **ALIGN)
    monkeypatch.setattr("holdfast.training.side_data.world", lambda: 2)
    with pytest.raises(ConfigError, match="3 harmful rows cannot be shared equally by 2 processes"):
        made(tmp_path / "b", given={"defense": {"name": defense, "harmful_batch_size": 3}}, **ALIGN)


@pytest.mark.parametrize("defense", ["booster", "antibody"])
def test_a_batch_larger_than_the_harmful_set_repeats_it(tmp_path, defense):
    found = []
    for size in (1, 5):
        options = {"name": defense, "harmful_batch_size": size}
        given = {"defense": options, "harmful_dataset": tiny.dataset(1, seed=5, start="w2")}
        trainer = made(tmp_path / str(size), given=given, optim="sgd", **ALIGN)
        trainer.train()
        found.append(weights(trainer))
    for name, theta in found[0].items():
        torch.testing.assert_close(found[1][name], theta, rtol=1e-4, atol=1e-6)


def test_the_same_is_allowed_where_no_row_is_weighted(tmp_path):
    off = {"name": "antibody", "temperature": None}
    one_row = {"per_device_train_batch_size": 1}
    made(tmp_path / "a", given={"defense": off}, harmful=False, loss_type="dft", **one_row).train()
    made(tmp_path / "b", label_smoothing_factor=0.1, **ALIGN)


def test_a_row_without_a_prompt_is_refused_when_it_comes(tmp_path):
    trainer = made(tmp_path, harmful=False)
    step = trainer.training_step

    def without_prompts(model, inputs, *args, **kwargs):
        return step(model, {**inputs, "labels": inputs["input_ids"]}, *args, **kwargs)

    trainer.training_step = without_prompts
    with pytest.raises(DataError, match="without a prompt"):
        trainer.train()


def test_harmful_texts_have_no_prompt_to_refuse(tmp_path):
    texts = [{"text": row["prompt"] + row["completion"]} for row in tiny.rows(6, seed=5)]
    with pytest.raises(DataError, match="no prompt to refuse"):
        made(tmp_path / "a", given={"harmful_dataset": texts}, **ALIGN)
    made(
        tmp_path / "b", given={"harmful_dataset": texts, "defense": {"name": "antibody", "lambda_ref": 0.0}}, **ALIGN
    ).train()


# -- what it does ------------------------------------------------------------------------------------------------------


def test_rows_of_both_stages(tmp_path):
    aligned = made(tmp_path / "a", **ALIGN)
    aligned.train()
    assert all(4 <= row["lambda"] <= 6 and row["harmful_loss"] > 0 for row in events(aligned))
    tuned = made(tmp_path / "b", harmful=False, gradient_accumulation_steps=2)
    tuned.train()
    assert all(0.5 <= row["effective_rows"] < 1 for row in events(tuned))
    assert len({row["score"] for row in events(tuned)}) == 3
    assert {"lambda", "harmful_loss"}.isdisjoint(events(tuned)[0])


def test_a_cold_softmax_trains_on_one_row(tmp_path):
    trainer = made(tmp_path, given={"defense": {"name": "antibody", "temperature": 1e-6}}, harmful=False)
    trainer.train()
    assert [row["effective_rows"] for row in events(trainer)] == pytest.approx([0.5] * 3)


def test_scores_do_not_see_dropout_and_leave_the_random_state_alone(tmp_path):
    """With dropout the trained pass draws masks as plain SFT does: equal weights reproduce it."""
    given = {"peft_config": tiny.lora(dropout=0.3)}
    plain = made(tmp_path / "a", given={**given, "defense": "sft"}, harmful=False)
    plain.train()
    hot = made(tmp_path / "b", given={**given, "defense": {"name": "antibody", "temperature": 1e9}}, harmful=False)
    hot.train()
    ours, theirs = weights(hot), weights(plain)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)


def test_lambda_continues_after_a_restart(tmp_path):
    options = {**ALIGN, "save_strategy": "steps", "save_steps": 2}
    given = {"defense": {"name": "antibody", "eta": 0.7, "momentum": 0.8}}
    whole = made(tmp_path, given=given, **options)
    whole.train()
    lambdas = [row["lambda"] for row in events(whole)]
    assert len(set(lambdas)) == 4
    again = made(tmp_path, given=given, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert [row["lambda"] for row in events(again)] == lambdas
    assert same(weights(again), weights(whole))


def test_refusals_go_to_harmful_pairs_in_turn(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.data.refusals.GENERIC", ("w5", "w6 w7", "w8 w9 w10"))
    trainer = made(tmp_path, **ALIGN)
    trainer.train()
    replies = [tuple(t for t in row.labels if t != -100) for row in trainer.defense._refused]
    words = tiny.tokenizer()
    expected = [tuple(words(f"{text} <eos>")["input_ids"]) for text in ("w5", "w6 w7", "w8 w9 w10")]
    assert replies == [expected[i % 3] for i in range(10)]
