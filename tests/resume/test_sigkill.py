"""Killed twenty times, a good share of them inside a save, and restarted each time: the same adapter, byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.resume.worker import STEPS

KILLS, SEED = 20, 20260
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """One campaign in a process of its own: forks of a process whose torch runs several threads would hang."""
    root = tmp_path_factory.mktemp("kills")
    print(f"seed {SEED}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.resume.worker", str(root), str(SEED), str(KILLS)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_restarted_run_ends_in_the_same_adapter(report):
    assert report["runs"]
    assert {run["sha256"] for run in report["runs"]} == {report["expected"]["sha256"]}


@pytest.mark.slow
def test_every_step_is_logged_once_with_the_same_figures(report):
    assert [row["step"] for row in report["expected"]["rows"]] == list(range(1, STEPS + 1))
    for run in report["runs"]:
        assert run["rows"] == report["expected"]["rows"]


@pytest.mark.slow
def test_a_killed_save_leaves_no_damaged_checkpoint_and_no_rubbish(report):
    for run in report["runs"]:
        assert run["quarantined"] == 0
        assert run["leftovers"] == 0


@pytest.mark.slow
def test_the_kills_struck_where_it_hurts(report):
    """Half of them inside a save, most of these with files half-written; others between and within steps."""
    deaths = report["deaths"]
    assert len(deaths) == KILLS
    doing = Counter(death["doing"] for death in deaths)
    assert doing["saving"] >= KILLS // 2
    assert doing["training"] >= KILLS // 4
    assert sum(death["left_staging"] for death in deaths) >= KILLS // 4
    assert sum(death["resumed_from"] > 0 for death in deaths) >= KILLS // 4
    assert Counter(death["kill"]["kind"] for death in deaths) == {"save": 10, "step": 5, "clock": 5}
