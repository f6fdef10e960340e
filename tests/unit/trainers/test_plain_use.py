"""The three lines of the README, and the usual variations of them."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from tests import tiny
from tests.unit.trainers import building
from tests.unit.trainers.building import COMMON, build
from transformers import AutoModelForCausalLM, TrainingArguments
from trl import SFTConfig

import holdfast as hf
from holdfast.core.errors import ConfigError
from holdfast.core.event_log import read


def test_three_lines_give_an_adapter_that_peft_loads_and_merges(tmp_path):
    base = tiny.saved(tmp_path / "base", layers=1)
    args = SFTConfig(str(tmp_path / "out"), **COMMON)  # a plain SFTConfig
    trainer = hf.SafeSFTTrainer(
        str(base), args, train_dataset=building.task(), safety_dataset=building.safety(), peft_config=tiny.lora()
    )
    trainer.train()
    trainer.save_model()

    ids = torch.tensor([[5, 9, 11, 20]])
    with torch.no_grad():
        expected = trainer.model.eval()(input_ids=ids).logits
        loaded = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base, dtype="float32"), tmp_path / "out"
        )
        assert torch.equal(loaded.eval()(input_ids=ids).logits, expected)
        merged = loaded.merge_and_unload()(input_ids=ids).logits
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-4)
    untouched = AutoModelForCausalLM.from_pretrained(base, dtype="float32")(input_ids=ids).logits
    assert float((untouched - expected).detach().abs().max()) > 1e-3
    assert not list((tmp_path / "out").glob("**/*.bin"))
    assert [row["step"] for row in read(tmp_path / "out" / "events.jsonl")] == [1, 2, 3]


def test_arguments_may_be_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # TRL's default is bf16=True, which transformers refuses without a GPU unless use_cpu is set.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    trainer = build(tmp_path, given={"args": None, "constraint": None})
    assert trainer.safety["safety"].constraint == hf.ChanceConstraint(unit="kl_token")
    trainer.args.max_steps, trainer.args.save_strategy = 1, "no"
    trainer.train()
    assert (tmp_path / "trainer_output" / "events.jsonl").exists()


def test_plain_arguments_keep_every_value(tmp_path):
    plain = SFTConfig(
        str(tmp_path), **{**COMMON, "learning_rate": 0.123, "lr_scheduler_type": "cosine", "warmup_steps": 7}
    )
    safe = hf.SafeSFTConfig.from_sft(plain)
    differing = {name for name, value in vars(plain).items() if getattr(safe, name, None) != value}
    assert differing <= {"distributed_state", "deepspeed_plugin", "_n_gpu", "accelerator_config", "mixed_precision"}
    assert (safe.learning_rate, safe.warmup_steps, str(safe.lr_scheduler_type.value)) == (0.123, 7, "cosine")


def test_training_arguments_are_taken_as_trl_takes_them(tmp_path):
    options = {k: v for k, v in COMMON.items() if k not in ("max_length",)}
    trainer = build(tmp_path, given={"args": TrainingArguments(str(tmp_path / "run"), **options)})
    assert trainer.args.learning_rate == COMMON["learning_rate"]
    assert isinstance(trainer.args, hf.SafeSFTConfig)


def test_without_a_safety_set_sft_runs_and_holdfast_is_refused(tmp_path):
    trainer = build(tmp_path, given={"safety_dataset": None, "defense": "sft"})
    trainer.train()
    assert trainer.safety == {}
    with pytest.raises(ConfigError, match="needs a safety set"):
        build(tmp_path, given={"safety_dataset": None})


@pytest.mark.parametrize(
    ("defense", "unit"),
    [("holdfast", "kl_token"), ("primal_dual", "kl_token"), ("sft", "kl_token"), ("penalty", "nll_token")],
)
def test_the_default_unit_is_that_of_a_run_file(tmp_path, defense, unit):
    made = build(tmp_path, given={"defense": defense, "constraint": None})
    assert made.safety["safety"].constraint.unit == unit
