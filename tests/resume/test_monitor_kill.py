"""Killed while the behaviour monitor asks, and resumed: the same adapter bits, the same figures, each measured once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_run_killed_while_its_monitor_asks_ends_as_if_it_had_not_been(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.resume.watched_worker", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    log = tmp_path / "children.log"
    assert done.returncode == 0, done.stderr[-3000:] + (log.read_text()[-3000:] if log.exists() else "")
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["endings"].pop("whole") == [0], log.read_text()[-3000:]
    killed = [-signal.SIGKILL, 0]
    assert report["endings"] == {"1": killed, "3": killed, "5": killed}, log.read_text()[-3000:]
    whole = report["runs"].pop("whole")
    assert [row["step"] for row in whole["rows"] if "behaviour" in row] == [2, 3, 4, 6, 8]
    assert whole["behaviour"]["behaviour"].keys() == {"refusals_kept", "answers_kept", "coverage"}
    for run in report["runs"].values():
        assert run == whole
