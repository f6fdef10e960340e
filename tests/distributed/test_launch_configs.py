"""Under the launch configurations of examples/launch a run file trains on two processes as on one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from holdfast.core.errors import UnsupportedError
from holdfast.runs.config import load_config
from holdfast.runs.pipeline import run
from tests import forkserver, rounding, tiny
from tests.distributed import launch_cases

SETTINGS = {
    "max_steps": 3, "learning_rate": 0.2, "lr_scheduler_type": "constant", "optim": "sgd", "bf16": False,
    "use_cpu": True, "gradient_accumulation_steps": 1, "gradient_checkpointing": True, "safety_batch_size": 8,
    "save_strategy": "no", "report_to": "none",
}  # fmt: skip


def write_run_file(folder: Path, processes: int) -> Path:
    """The tiny model, eight task rows a step whatever the number of processes."""
    folder.mkdir()
    tiny.saved(folder / "model", layers=1)
    for seed, name in enumerate(("task", "safety"), 1):
        rows = tiny.rows(40, seed=seed, start=f"w{seed}")
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    content = {
        "model": str(folder / "model"), "dtype": "float32", "output_dir": str(folder / "out"),
        "task": {"data": str(folder / "task.jsonl")}, "safety": {"data": str(folder / "safety.jsonl")},
        "constraint": {"tau": 0.1, "alpha": 0.2}, "monitor": {"prompts": 0},
        "lora": {"r": 4, "alpha": 8, "dropout": 0.0},
        "train": SETTINGS | {"per_device_train_batch_size": 8 // processes},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return folder / "run.yaml"


def adapter(run_file: Path) -> dict[str, torch.Tensor]:
    return load_file(run_file.parent / "out" / "adapter" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    path = write_run_file(tmp_path_factory.mktemp("alone") / "run", 1)
    log = path.with_name("log")
    assert forkserver.finished(forkserver.started(launch_cases.train, path, log=log)) == 0, log.read_text()[-3000:]
    return path


def test_two_sharded_processes_train_what_one_does(tmp_path, alone):
    path = write_run_file(tmp_path / "run", 2)
    environment = launch_cases.variables("fsdp2", 2)
    forkserver.ranks(launch_cases.train, path, log=path.with_name("log"), environment=environment)
    ranks = [torch.load(path.with_name(f"rank-{rank}.pt")) for rank in range(2)]
    assert [rank["world"] for rank in ranks] == [2, 2]
    assert [rank["share"] for rank in ranks] == pytest.approx([0.5, 0.5])
    expected, found = adapter(alone), adapter(path)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=rounding.FLOAT32, atol=rounding.FLOAT32)


def test_asking_a_model_that_will_be_sharded_is_refused(tmp_path, monkeypatch):
    path = write_run_file(tmp_path / "run", 1)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", launch_cases.variables("fsdp2", 2)["ACCELERATE_USE_FSDP"])
    with pytest.raises(UnsupportedError, match="screening or a behaviour monitor under FSDP") as caught:
        run(load_config(path, ["monitor.prompts=20"]))
    assert "monitor: {prompts: 0}" in caught.value.remedy


def test_every_configuration_is_tested():
    """Those of DDP and ZeRO-2 by tests/sharding and tests/deepspeed, under `accelerate launch` itself."""
    assert "MULTI_GPU" in (launch_cases.CONFIGS / "ddp.yaml").read_text(encoding="utf-8")
    assert launch_cases.variables("ddp", 2).get("ACCELERATE_USE_FSDP") is None
    assert sorted(path.stem for path in launch_cases.CONFIGS.glob("*.yaml")) == ["ddp", "fsdp2", "zero2"]
