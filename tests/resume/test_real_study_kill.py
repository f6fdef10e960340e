"""A study of real cells on a tiny model, killed in the alignment, in training and in the evaluation: same figures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from tests import tiny
from tests.protocol_data import make_data_folder

ROOT = Path(__file__).parents[2]
PATIENCE = 300
STUDY = {
    "preset": "small",
    "tasks": ["sst2"],
    "defenses": ["sft", "holdfast"],
    "references": False,
    "workers": 2,
    "protocol": {
        "dtype": "float32",
        "keep": "pairs",
        "roles": {"align": 16, "monitor": 6, "certify": 4, "harmful": 4, "poison": 10, "evaluation": 8, "asked": 0},
        "size": 20,
        "train": {
            "num_train_epochs": 2, "max_length": 128, "per_device_train_batch_size": 4, "use_cpu": True, "save_steps": 2
        },
        "lora": {"r": 4},
        "evaluation": {"judge": "refusal", "harm_tokens": 6, "task_tokens": 4, "task_examples": 5},
    },
}  # fmt: skip


def run(study: Path, environment: dict[str, str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "holdfast", "study", str(study)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def killed_when(process: subprocess.Popen, happened) -> None:
    """Kill the scheduler, and with it its workers, once something has happened."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert process.poll() is None, "the study ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


def results(folder: Path) -> dict[str, dict]:
    found = {path.name: json.loads(path.read_text()) for path in sorted((folder / "results").glob("[!.]*.json"))}
    for result in found.values():
        del result["seconds"], result["provenance"]
    return found


@pytest.mark.slow
def test_a_killed_study_of_real_cells_ends_in_the_same_figures(tmp_path):
    model = tiny.saved(tmp_path / "model")
    environment = {
        **os.environ, "HOLDFAST_DATA": str(make_data_folder(tmp_path / "data")), "OMP_NUM_THREADS": "1",
        "HOLDFAST_CACHE": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE",
    }  # fmt: skip
    files = {}
    for name in ("whole", "killed"):
        files[name] = tmp_path / f"{name}.yaml"
        settings = {**STUDY, "models": [{"ref": str(model), "name": "tiny"}], "output_dir": str(tmp_path / name)}
        files[name].write_text(yaml.safe_dump(settings))
    assert run(files["whole"], environment).wait(PATIENCE) == 0
    out = tmp_path / "killed"
    moments = {
        "aligning": lambda: any(out.glob("alignments/*/run/events.jsonl")),
        "training": lambda: any(out.glob("cells/*/run/checkpoints/checkpoint-*")),
        "evaluating": lambda: any(out.glob("cells/*/run/result.json")),
    }
    for happened in moments.values():
        killed_when(run(files["killed"], environment), happened)
    assert run(files["killed"], environment).wait(PATIENCE) == 0
    assert len(results(out)) == 2
    assert results(out) == results(tmp_path / "whole")
