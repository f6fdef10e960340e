"""The same run from a run file and from Python has the same adapter, bit for bit: both read one table of defaults.

What Python has to say that a run file need not: the fields of `train:` and `lora:` (SafeSFTConfig keeps TRL's, which it
is a drop-in for), the share of every role, and rows as chat turns with the reply as their completion.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file

import holdfast as hf
from holdfast.defaults import block, constraint_defaults, default, train_defaults
from holdfast.runs.config import config_from_dict
from tests import tiny

STEPS: dict[str, Any] = {
    "max_steps": 4, "use_cpu": True, "bf16": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    "per_device_train_batch_size": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.saved(tmp_path_factory.mktemp("model"), layers=1))


def turns(rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["completion"]}],
        }
        for row in rows
    ]


def from_run_file(folder: Path, model: str, task: list[dict[str, Any]], **changes: Any) -> dict[str, torch.Tensor]:
    for name, rows in (("task", task), ("safety", tiny.rows(20, seed=2, start="w1"))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {
        "model": model, "dtype": "float32", "task": {"data": "task.jsonl"}, "safety": {"data": "safety.jsonl"},
        "monitor": {"prompts": 0}, "train": STEPS, "output_dir": str(folder / "yaml"), **changes,
    }  # fmt: skip
    made = hf.run(config_from_dict(settings, folder=folder))
    return load_file(made.folder / "adapter" / "adapter_model.safetensors")


def from_python(
    folder: Path, model: str, task: list[dict[str, Any]], *, limit: hf.ChanceConstraint | None, defense: Any
) -> dict[str, torch.Tensor]:
    lora = block("lora")
    trainer = hf.SafeSFTTrainer(
        model,
        hf.SafeSFTConfig(
            **{**train_defaults(full=False), **STEPS}, output_dir=str(folder / "python"), seed=default("seed"),
            safety_fractions=default("safety.data.fractions"), model_init_kwargs={"dtype": "float32"},
        ),
        train_dataset=Dataset.from_list(task), safety_dataset=turns(tiny.rows(20, seed=2, start="w1")),
        constraint=limit, defense=defense,
        peft_config=LoraConfig(
            r=lora["r"], lora_alpha=lora["alpha"], lora_dropout=lora["dropout"], task_type="CAUSAL_LM",
            target_modules=lora["target_modules"],
        ),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(folder / "python" / "adapter"))
    return load_file(folder / "python" / "adapter" / "adapter_model.safetensors")


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    assert ours.keys() == theirs.keys()
    assert any(bool(tensor.any()) for name, tensor in ours.items() if "lora_B" in name)  # something was learned
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_table_written_out_gives_the_adapter_of_a_silent_run_file(tmp_path, model):
    task = tiny.rows(16, seed=1)
    limit, options = hf.ChanceConstraint(**constraint_defaults()), {"name": "holdfast", **block("defense")}
    python = from_python(tmp_path, model, turns(task), limit=limit, defense=options)
    assert same(from_run_file(tmp_path, model, task), python)


def test_constraint_and_defense_need_not_be_written_in_python_either(tmp_path, model):
    task = tiny.rows(16, seed=1)
    python = from_python(tmp_path, model, turns(task), limit=None, defense="holdfast")
    assert same(from_run_file(tmp_path, model, task), python)


def test_another_setting_gives_another_adapter(tmp_path, model):
    """Or the tests above show nothing."""
    task = tiny.rows(16, seed=1)
    python = from_python(tmp_path, model, turns(task), limit=None, defense="holdfast")
    assert not same(from_run_file(tmp_path, model, task, lora={"dropout": 0.1}), python)


@pytest.mark.xfail(reason="TRL scores every token of `messages` rows, a run file the last reply alone", strict=True)
def test_messages_are_scored_alike(tmp_path, model):
    task = [{"messages": [*row["prompt"], *row["completion"]]} for row in turns(tiny.rows(16, seed=1))]
    python = from_python(tmp_path, model, task, limit=None, defense="holdfast")
    assert same(from_run_file(tmp_path, model, task), python)


def test_a_constraint_from_python_counts_in_the_unit_of_a_run_file():
    assert hf.ChanceConstraint().unit == default("constraint.unit")
