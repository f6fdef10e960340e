"""Studies whose work is fake."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.unit.study.fakes import CALLS, KNOWN

from holdfast_lab.study.config import StudyConfig
from holdfast_lab.study.schedule import Calls, Outcome, Plan, make_plan, run_study

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _workers_find_the_fakes(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("holdfast_lab.study.schedule.PAUSE", 0.02)


class FakeStudy:
    """A study in a temporary folder: `plan(seeds=[1])`, `run()`, and what it left behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def plan(self, **changes: Any) -> Plan:
        values = {
            "models": ["embedded"], "tasks": ["sst2"], "defenses": ["sft", "holdfast"], "references": False,
            "workers": 2, "output_dir": str(self.folder), **changes,
        }  # fmt: skip
        return make_plan(StudyConfig.model_validate(values), calls=Calls(*CALLS.values()), names=lambda: KNOWN)

    def run(self, *, retry_failed: bool = False, **changes: Any) -> Outcome:
        return run_study(self.plan(**changes), retry_failed=retry_failed)

    def results(self) -> dict[str, dict[str, Any]]:
        return {p.stem: json.loads(p.read_text()) for p in sorted((self.folder / "results").glob("*.json"))}

    def begun(self) -> list[str]:
        """Ids of the nodes whose work was begun, in order, once for each time."""
        file = self.folder / "trace.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [row["node"] for row in rows if row["event"] == "begin"]

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]

    def record(self) -> dict[str, Any]:
        return json.loads((self.folder / "study.json").read_text())


@pytest.fixture
def study(tmp_path) -> FakeStudy:
    return FakeStudy(tmp_path / "out")
