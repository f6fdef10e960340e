"""Killed while the behaviour monitor asks, and resumed: the same adapter bits, the same figures, each measured once."""

from __future__ import annotations

import json
import signal

from tests import forkserver
from tests.resume import watched_worker


def test_a_run_killed_while_its_monitor_asks_ends_as_if_it_had_not_been(tmp_path):
    log = tmp_path / "children.log"
    process = forkserver.started(watched_worker.main, tmp_path, log=log)
    assert forkserver.finished(process) == 0, log.read_text()[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["endings"].pop("whole") == [0], log.read_text()[-3000:]
    killed = [-signal.SIGKILL, 0]
    assert report["endings"] == {"1": killed, "3": killed, "5": killed}, log.read_text()[-3000:]
    whole = report["runs"].pop("whole")
    assert [row["step"] for row in whole["rows"] if "behaviour" in row] == [2, 3, 4, 6, 8]
    assert whole["behaviour"]["behaviour"].keys() == {"refusals_kept", "answers_kept", "coverage"}
    for run in report["runs"].values():
        assert run == whole
