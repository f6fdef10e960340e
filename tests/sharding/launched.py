"""Run files under `accelerate launch` itself, with the configurations of examples/launch; four processes; QLoRA.

`make test-sharding` runs this file; tests/distributed/test_launch_configs.py is the part that the suite has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests import rounding
from tests.distributed import launch_cases
from tests.distributed.test_launch_configs import adapter, write_run_file

ROOT = Path(__file__).parents[2]


def launched(run_file: Path, name: str, processes: int) -> subprocess.CompletedProcess[str]:
    """`accelerate launch` with a configuration of examples/launch."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    command += [str(launch_cases.CONFIGS / f"{name}.yaml"), "--num_processes", str(processes)]
    command += ["--main_process_port", "0", "-m", "tests.distributed.launch_cases", str(run_file)]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, timeout=300, capture_output=True, text=True, check=False)


def launch(run_file: Path, name: str, processes: int) -> list[dict[str, float]]:
    """What each rank noted."""
    done = launched(run_file, name, processes)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return [torch.load(run_file.with_name(f"rank-{rank}.pt")) for rank in range(processes)]


def write_packed_run_file(folder: Path, quantization: str) -> Path:
    pytest.importorskip("bitsandbytes", reason="QLoRA needs the extra `quantized`")
    path = write_run_file(folder, 2)
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump(content | {"quantization": quantization}), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    path = write_run_file(tmp_path_factory.mktemp("alone") / "run", 1)
    subprocess.run(
        [sys.executable, "-m", "tests.distributed.launch_cases", str(path)], cwd=ROOT, timeout=300, check=True
    )  # fmt: skip
    return path


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_accelerate_launch_trains_what_one_process_does(tmp_path, alone, name, processes):
    path = write_run_file(tmp_path / "run", processes)
    ranks = launch(path, name, processes)
    assert [rank["world"] for rank in ranks] == [processes] * processes
    share = 1.0 if name == "ddp" else 1 / processes
    assert [rank["share"] for rank in ranks] == pytest.approx([share] * processes)
    expected, found = adapter(alone), adapter(path)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=rounding.FLOAT32, atol=rounding.FLOAT32)


def test_the_packed_base_of_a_run_file_is_sharded(tmp_path):
    """As bytes, bitsandbytes' default, accelerate would leave it whole on every rank."""
    path = write_packed_run_file(tmp_path / "run", "4bit")
    ranks = launch(path, "fsdp2", 2)
    assert [rank["share"] for rank in ranks] == pytest.approx([0.5, 0.5])
    assert any(bool(value.any()) for name, value in adapter(path).items() if "lora_B" in name)


def test_8_bits_are_refused(tmp_path):
    done = launched(write_packed_run_file(tmp_path / "run", "8bit"), "fsdp2", 2)
    assert done.returncode != 0
    assert "error: an 8-bit base under FSDP2" in done.stdout + done.stderr
