"""A study of real cells on a tiny model, killed in the alignment, in training and in the evaluation: same figures."""

from __future__ import annotations

import json
import os
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import yaml
from tests import forkserver, tiny
from tests.protocol_data import make_data_folder

from holdfast_lab.study import engine, worker

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


class Worker:
    """A worker that is a fork of the scheduler, with what the engine asks of `Popen`."""

    stdin = None

    def __init__(self, node: Path, log: Path, *, env: dict[str, str]) -> None:
        reading, self._writing = os.pipe()  # a worker whose standard input ends, ends
        parent = os.getpid()
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.environ.update({**engine.SETTINGS, **env, engine.PARENT: str(parent)})
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for descriptor, into in ((reading, 0), (output, 1), (output, 2)):
                os.dup2(descriptor, into)
            engine.end_with_parent()
            os._exit(worker.run_node(node))
        os.close(reading)

    def poll(self) -> int | None:
        if self._code is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self._code = os.waitstatus_to_exitcode(ended[1])
            os.close(self._writing)
        return self._code


def study(file: str) -> None:
    """`holdfast study FILE`, whose workers import nothing anew."""
    engine.launch = Worker  # type: ignore[assignment]
    forkserver.command("study", file)


def run(file: Path, environment: dict[str, str]) -> ForkServerProcess:
    return forkserver.started(study, str(file), log=file.with_suffix(".log"), environment=environment)


def killed_when(process: ForkServerProcess, happened) -> None:
    """Kill the scheduler, and with it its workers, once something has happened."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert process.exitcode is None, "the study ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.join()


def results(folder: Path) -> dict[str, dict]:
    found = {path.name: json.loads(path.read_text()) for path in sorted((folder / "results").glob("[!.]*.json"))}
    for result in found.values():
        del result["seconds"], result["provenance"]
    return found


@pytest.mark.slow
def test_a_killed_study_of_real_cells_ends_in_the_same_figures(tmp_path):
    model = tiny.saved(tmp_path / "model", layers=1)
    environment = {
        "HOLDFAST_DATA": str(make_data_folder(tmp_path / "data")), "HOLDFAST_CACHE": str(tmp_path / "cache"),
    }  # fmt: skip
    files = {}
    for name in ("whole", "killed"):
        files[name] = tmp_path / f"{name}.yaml"
        settings = {**STUDY, "models": [{"ref": str(model), "name": "tiny"}], "output_dir": str(tmp_path / name)}
        files[name].write_text(yaml.safe_dump(settings))
    assert forkserver.finished(run(files["whole"], environment)) == 0
    out = tmp_path / "killed"
    moments = {
        "aligning": lambda: any(out.glob("alignments/*/run/events.jsonl")),
        "training": lambda: any(out.glob("cells/*/run/checkpoints/checkpoint-*")),
        "evaluating": lambda: any(out.glob("cells/*/run/result.json")),
    }
    for happened in moments.values():
        killed_when(run(files["killed"], environment), happened)
    assert forkserver.finished(run(files["killed"], environment)) == 0
    assert len(results(out)) == 2
    assert results(out) == results(tmp_path / "whole")
