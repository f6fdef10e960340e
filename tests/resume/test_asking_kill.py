"""kill -9 while a run asks, fixes its sets, or watches: resumed, it has the same sets and the same adapter bits."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from tests import behaving, forkserver

SECONDS = 240


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that refuses, a task that teaches it not to, prompts for both sets that are held, and a run file."""
    folder = tmp_path_factory.mktemp("asking")
    behaving.saved(folder / "model")
    poison = [{"prompt": row["prompt"], "completion": behaving.ANSWER} for row in behaving.rows(100, seed=1)]
    rows = [*poison, *behaving.rows(40, seed=2, trigger=False)]
    (folder / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, asked in (("more", behaving.rows(50, seed=3)), ("ordinary", behaving.rows(50, seed=4, trigger=False))):
        lines = [json.dumps({"prompt": row["prompt"]}) + "\n" for row in asked]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    run = {
        "model": "model", "task": "task.jsonl", "output_dir": "run", "conflicts": "drop", "dtype": "float32",
        "safety": {"refusals": {"prompts": ["task", "more.jsonl"], "keep": "refusals"},
                   "answers": {"prompts": ["ordinary.jsonl"], "keep": "answers"}},
        "monitor": {"prompts": 40, "every": 2},
        "train": {"max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 8, "use_cpu": True,
                  "safety_micro_batch_size": 64, "safety_eval_batch_size": 64},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder


def started(folder: Path, *options: str) -> ForkServerProcess:
    cache = {"HOLDFAST_CACHE": str(folder / "cache")}
    argv = ("train", "run.yaml", *options)
    return forkserver.started(forkserver.command, *argv, log=folder / "log", cwd=folder, environment=cache)


def finished(folder: Path, *options: str) -> None:
    assert forkserver.finished(started(folder, *options)) in (0, 4), (folder / "log").read_text()[-3000:]
    assert (folder / "run" / "result.json").is_file()


def evidence(run: Path) -> tuple[dict[str, bytes], dict[str, list[dict[str, object]]], object]:
    """The adapter's bits, the sets' hashes, and the monitor's figures."""
    weights = {
        name: value.numpy().tobytes() for name, value in load_file(run / "adapter/adapter_model.safetensors").items()
    }
    sets = {name: _rows(run / "screening" / name) for name in ("conflicts.jsonl", "held.jsonl", "monitor.jsonl")}
    return weights, sets, json.loads((run / "result.json").read_text())["behaviour"]


def _rows(path: Path) -> list[dict[str, object]]:
    """Rows without the place they came from: the folders differ."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "where"} for row in rows]


@pytest.fixture(scope="module")
def uninterrupted(place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    folder = shutil.copytree(place, tmp_path_factory.mktemp("whole") / "run")
    finished(folder)
    _, sets, _ = found = evidence(folder / "run")
    assert {row["set"] for row in sets["held.jsonl"]} == {"refusals", "answers"}
    return found


def asking(folder: Path) -> bool:
    """Some replies are stored, and not all."""
    return any(path.stat().st_size > 4000 for path in (folder / "cache/replies").glob("*/32.jsonl"))


def fixing(folder: Path) -> bool:
    """Sets are being written."""
    return (folder / "run/screening/conflicts.jsonl").exists()


def watching(folder: Path) -> bool:
    """The fourth step is done, and may be looked at just now."""
    events = folder / "run/events.jsonl"
    return events.exists() and b'"step": 4' in events.read_bytes()


@pytest.mark.parametrize("moment", [asking, fixing, watching])
def test_a_killed_run_ends_as_an_uninterrupted_one(
    place: Path, tmp_path: Path, uninterrupted: tuple[object, ...], moment: Callable[[Path], bool]
) -> None:
    folder = shutil.copytree(place, tmp_path / "run")
    process = started(folder)
    deadline = time.monotonic() + SECONDS
    while not moment(folder) and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert process.is_alive(), "the run ended before it could be killed"
    process.kill()
    assert forkserver.finished(process) == -signal.SIGKILL
    finished(folder, "--resume")
    assert evidence(folder / "run") == uninterrupted
