"""Killed twenty times, a good share of them inside a save, and restarted each time: the same adapter, byte for byte."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tests import forkserver
from tests.resume import worker
from tests.resume.worker import STEPS

KILLS, SEED = 20, 20260


def campaign(root: Path) -> dict:
    """Run in a process of its own: forks of a process whose torch runs several threads would hang."""
    log = root / "campaign.log"
    assert forkserver.finished(forkserver.started(worker.main, root, SEED, KILLS, log=log)) == 0, log.read_text()[
        -3000:
    ]
    return json.loads((root / "report.json").read_text())


def require_same_outcome(report: dict) -> None:
    """Adapter and log of every restarted run; a killed save left no damaged checkpoint and no rubbish."""
    assert report["runs"]
    assert [row["step"] for row in report["expected"]["rows"]] == list(range(1, STEPS + 1))
    for run in report["runs"]:
        assert run["sha256"] == report["expected"]["sha256"]
        assert run["rows"] == report["expected"]["rows"]  # each step once, with the same figures
        assert run["quarantined"] == 0
        assert run["leftovers"] == 0


def require_hard_kills(deaths: list[dict]) -> None:
    """Half of the kills struck inside a save, most of them with files half-written; others within and between steps."""
    assert len(deaths) == KILLS
    doing = Counter(death["doing"] for death in deaths)
    assert doing["saving"] >= KILLS // 2
    assert doing["training"] >= KILLS // 4
    assert sum(death["left_staging"] for death in deaths) >= KILLS // 4
    assert sum(death["resumed_from"] > 0 for death in deaths) >= KILLS // 4
    assert Counter(death["kill"]["kind"] for death in deaths) == {"save": 10, "step": 5, "clock": 5}


@pytest.mark.slow
def test_killed_and_restarted_runs_end_in_the_same_adapter(tmp_path):
    print(f"seed {SEED}")
    report = campaign(tmp_path)
    require_same_outcome(report)
    require_hard_kills(report["deaths"])
