"""Run files from alignment to fine-tuning on one adapter, as the authors of Booster and Antibody do it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from tests import tiny

from holdfast.core.event_log import read
from holdfast.runs.config import config_from_dict
from holdfast.runs.pipeline import run

LORA = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}
AFTER = {"vaccine": "sft", "booster": "sft", "antibody": "antibody"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model, and data of four kinds."""
    folder = tmp_path_factory.mktemp("continued")
    tiny.saved(folder / "model", layers=1)
    for seed, kind in enumerate(("safe", "harmful", "task", "kept")):
        rows = tiny.rows(24, seed=seed + 3, start=f"w{seed}")
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def finished(folder, name, **settings):
    train = {
        "max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "bf16": False, "use_cpu": True,
        "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    raw = {
        "dtype": "float32", "safety": {"data": "kept.jsonl"}, "constraint": {"tau": 0.5, "alpha": 0.5}, "lora": LORA,
        "train": train, "output_dir": str(folder / name), **settings,
    }  # fmt: skip
    return run(config_from_dict(raw, folder=folder)).folder


@pytest.mark.parametrize("defense", list(AFTER))
def test_fine_tuning_goes_on_with_the_adapter_of_the_alignment(world, defense):
    side = {} if defense == "vaccine" else {"harmful": {"data": "harmful.jsonl"}}
    start = {"model": str(world / "model"), "stage": "align", "task": {"data": "safe.jsonl"}}
    aligned = finished(world, f"{defense}-align", **start, **side, defense={"name": defense})
    settings = {
        "model": str(aligned / "adapter"), "adapter_policy": "continue", "task": {"data": "task.jsonl"},
        "defense": {"name": AFTER[defense]},
    }  # fmt: skip
    tuned = finished(world, f"{defense}-tuned", **settings)
    before, after = (load_file(f / "adapter" / "adapter_model.safetensors") for f in (aligned, tuned))
    assert before.keys() == after.keys()
    # Three steps of Adam at 0.01 from where the alignment ended; a fresh adapter has other matrices A and zero B.
    moved = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert 1e-3 < moved < 0.05
    assert max(float(before[name].abs().max()) for name in before if "lora_B" in name) > 1e-3
    config = json.loads((tuned / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(world / "model")
    rows = read(tuned / "events.jsonl")
    assert len(rows) == 3
    assert all(("effective_rows" in row) == (defense == "antibody") for row in rows)
    assert all(torch.isfinite(theta).all() for theta in after.values())
