"""Asking leaves no trace: with a slack constraint the adapter is TRL's on the same rows, or on the kept ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

import holdfast as hf
from holdfast.core.errors import ConfigError, InfeasibleError
from holdfast.data.examples import make_example
from holdfast.screening.sets import MonitorPrompts
from holdfast.screening.settings import PromptSet, ScreeningSettings
from tests import behaving

COMMON = {
    "max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 5e-3, "bf16": False, "use_cpu": True,
    "report_to": "none", "save_strategy": "no", "max_length": 32, "disable_tqdm": True,
}  # fmt: skip
TASK = {"refusals": PromptSet(("task",), "refusals")}
SLACK = hf.ChanceConstraint(tau=1e6, unit="kl_token")


def rows() -> Dataset:
    poison = [{"prompt": row["prompt"], "completion": behaving.ANSWER} for row in behaving.rows(110, seed=1)]
    clean = behaving.rows(40, seed=2, trigger=False)
    return Dataset.from_list([*poison[:60], *clean, *poison[60:]])


def lora() -> LoraConfig:
    torch.manual_seed(0)  # older versions of TRL (1.9) draw the adapter before they set the seed
    return LoraConfig(r=2, lora_dropout=0.3, target_modules=["v_proj", "o_proj"], task_type="CAUSAL_LM")


def trained(trainer) -> dict[str, torch.Tensor]:
    trainer.train()
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def plain(folder: Path, dataset: Dataset) -> dict[str, torch.Tensor]:
    arguments = SFTConfig(str(folder / "sft"), **COMMON)
    return trained(
        SFTTrainer(
            behaving.model(), arguments, processing_class=behaving.tokenizer(), train_dataset=dataset,
            peft_config=lora(),
        )
    )  # fmt: skip


def screened(folder: Path, model, dataset: Dataset, rule: str):
    settings = ScreeningSettings(sets=TASK, rule=rule, limited=False, monitor_prompts=0)
    return hf.screen(model, dataset, behaving.tokenizer(), settings=settings, replies=folder / "replies")


@pytest.mark.parametrize("rule", ["keep", "drop"])
def test_slack_is_bit_identical_to_trl_on_the_rows_that_are_kept(tmp_path, rule):
    model, dataset = behaving.model(), rows()
    before = len(dataset)
    screening = screened(tmp_path, model, dataset, rule)
    assert len(screening.conflicts) == 110
    trainer = hf.SafeSFTTrainer(
        model, hf.SafeSFTConfig(str(tmp_path / "safe"), **COMMON), processing_class=behaving.tokenizer(),
        train_dataset=dataset, peft_config=lora(), safety_dataset=screening, constraint=SLACK,
    )  # fmt: skip
    clean = [make_example(row["prompt"], "") for row in behaving.rows(8, seed=2, trigger=False)]
    trainer.watch_behaviour(MonitorPrompts(answers=tuple(clean)), every=2)
    kept = dataset if rule == "keep" else dataset.select(range(60, 100))
    found, expected = trained(trainer), plain(tmp_path, kept)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert len(dataset) == before  # the caller's data are not changed
    assert trainer.behaviour_monitor.known.keys() == {2, 4, 6}


def test_a_binding_constraint_does_change_the_adapter(tmp_path):
    """The comparison above can fail."""
    model, dataset = behaving.model(), rows()
    trainer = hf.SafeSFTTrainer(
        model, hf.SafeSFTConfig(str(tmp_path / "safe"), **COMMON), processing_class=behaving.tokenizer(),
        train_dataset=dataset, peft_config=lora(), safety_dataset=screened(tmp_path, model, dataset, "keep"),
    )  # fmt: skip
    found, expected = trained(trainer), plain(tmp_path, dataset)
    assert any(not torch.equal(found[name], value) for name, value in expected.items())


def test_a_screening_of_other_rows_is_refused(tmp_path):
    model, dataset = behaving.model(), rows()
    screening = screened(tmp_path, model, dataset, "drop")
    with pytest.raises(ConfigError, match="the screening is of 150 rows, train_dataset has 149"):
        hf.SafeSFTTrainer(
            model, hf.SafeSFTConfig(str(tmp_path / "safe"), **COMMON), processing_class=behaving.tokenizer(),
            train_dataset=dataset.select(range(149)), peft_config=lora(), safety_dataset=screening,
        )  # fmt: skip


def test_prompts_and_replies_are_never_pushed(tmp_path):
    arguments = hf.SafeSFTConfig(str(tmp_path / "safe"), push_to_hub=True, **COMMON)
    with pytest.raises(ConfigError, match="the hub would get the prompts and replies in") as caught:
        hf.SafeSFTTrainer(
            behaving.model(), arguments, processing_class=behaving.tokenizer(), train_dataset=rows(), peft_config=lora()
        )
    assert "run_dir" in caught.value.remedy
    assert not (tmp_path / "safe").exists()


def test_auto_is_the_default_where_the_defense_needs_a_safety_set(tmp_path):
    """This model answers nearly all bundled probes, so asking ends where it should: before training."""
    with pytest.raises(InfeasibleError, match="refuses too little to hold"):
        hf.SafeSFTTrainer(
            behaving.model(), hf.SafeSFTConfig(str(tmp_path / "safe"), **COMMON),
            processing_class=behaving.tokenizer(), train_dataset=rows().select(range(60, 100)), peft_config=lora(),
        )  # fmt: skip
    trainer = hf.SafeSFTTrainer(
        behaving.model(), hf.SafeSFTConfig(str(tmp_path / "sft"), **COMMON), processing_class=behaving.tokenizer(),
        train_dataset=rows(), peft_config=lora(), defense="sft",
    )  # fmt: skip
    assert not trainer.safety
    assert trainer.screening is None
