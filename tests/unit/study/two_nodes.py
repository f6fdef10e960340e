"""A study on two Ray nodes: its scheduler is killed, it goes on, a node is lost, it goes on again; no cell is lost.

`make test-ray` runs this file; the suite does not collect it. The nodes are those of Ray's own test cluster: two sets
of Ray processes on this machine, with one processor each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
ROOT = Path(__file__).parents[3]
SECONDS = 240
CELLS, STEPS = 6, 8
DRIVER = """
import json, sys
from tests.unit.study.fakes import CALLS, KNOWN
from holdfast_lab.study.config import StudyConfig
from holdfast_lab.study.schedule import Calls, make_plan
from holdfast_lab.study.schedule import run_study

study = StudyConfig.model_validate(json.loads(sys.argv[1]))
plan = make_plan(study, calls=Calls(*CALLS.values()), names=lambda: KNOWN)
outcome = run_study(plan, retry_failed=len(sys.argv) > 2)
print(json.dumps({"done": sorted(outcome.done), "failed": sorted(outcome.failed)}))
"""


class Study:
    """Fake cells of eight steps of half a second, in a folder; schedulers are processes."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address

    def start(self, *words: str) -> subprocess.Popen[str]:
        settings = json.dumps({
            "models": ["embedded"], "tasks": ["sst2", "ag_news", "gsm8k"], "defenses": ["sft", "holdfast"],
            "references": False, "workers": 1, "engine": "ray", "output_dir": str(self.folder),
            "protocol": {"fake": {"steps": STEPS, "pause": 0.5}},
        })  # fmt: skip
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": paths, "RAY_ADDRESS": self.address, "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.Popen(
            [sys.executable, "-c", DRIVER, settings, *words], cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def finished(self, scheduler: subprocess.Popen[str]) -> dict[str, Any]:
        out, err = scheduler.communicate(timeout=SECONDS)
        assert scheduler.returncode == 0, err[-3000:]
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found

    def results(self) -> set[str]:
        """Cells that are done, by name; a hash follows it, of the settings in a result and of the node in a trace."""
        return {path.stem.rpartition("-")[0] for path in (self.folder / "results").glob("*.json")}

    def trace(self) -> list[dict[str, Any]]:
        file = self.folder / "trace.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [{**row, "node": row["node"].rpartition("-")[0]} for row in rows]

    def running(self) -> dict[str, int]:
        """Cells whose worker lives and has not ended, with the steps that they have left."""
        rows = self.trace()
        pids = {row["node"]: row["pid"] for row in rows if row["event"] == "begin"}
        steps = Counter(row["node"] for row in rows if row["event"] == "step")
        ended = {row["node"] for row in rows if row["event"] == "end"}
        return {cell: STEPS - steps[cell] for cell, pid in pids.items() if cell not in ended and alive(pid)}

    def busy(self) -> bool:
        """Both nodes work, each on a cell that is not about to end: one processor a node, one a cell."""
        left = self.running().values()
        return len(left) == 2 and min(left) >= 3


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < deadline, f"{what}: not within {SECONDS} s"
        time.sleep(0.05)


@pytest.fixture
def cluster(monkeypatch) -> Iterator[Any]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))  # of the nodes' workers
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield made
    made.shutdown()


def test_a_killed_scheduler_and_a_lost_node_lose_no_cell(tmp_path, cluster):
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    study = Study(tmp_path / "out", cluster.address)

    first = study.start()
    until(lambda: len(study.results()) >= 2 and study.busy(), "two done, one running on each node")
    first.kill()
    first.communicate()
    until(lambda: not study.running(), "the workers of a killed scheduler end")
    done = study.results()
    assert 2 <= len(done) < CELLS

    again = study.start()
    until(study.busy, "one running on each node again")
    cluster.remove_node(second, allow_graceful=False)
    outcome = study.finished(again)
    assert len(outcome["failed"]) == 1  # what ran on the lost node is named
    assert len(study.results()) == CELLS - len(outcome["failed"])

    last = study.finished(study.start("retry"))
    assert last["failed"] == []
    assert len(study.results()) == CELLS
    begins = Counter(row["node"] for row in study.trace() if row["event"] == "begin")
    assert len(set(begins) - study.results()) == 1  # the alignment, which all cells share
    assert study.results() <= set(begins)
    assert all(begins[cell] == 1 for cell in done)  # nothing that was done is done again
    assert sum(begins.values()) > CELLS + 1  # and what was killed began again
    steps = Counter(row["node"] for row in study.trace() if row["event"] == "step")
    assert max(steps.values()) == STEPS  # where it had been killed
