"""A study on a local Ray of two processors: the same results, the same records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
ROOT = Path(__file__).parents[3]
TIMEOUT = 300
NO_RAY = 42
CODE = (
    f"NO_RAY = {NO_RAY}"
    + """
import json, signal, sys
import ray
from tests.unit.study.fakes import CALLS, KNOWN
from holdfast_lab.study.schedule import Calls, make_plan
from holdfast_lab.study.schedule import run_study
from holdfast_lab.study.config import StudyConfig

signal.signal(signal.SIGALRM, lambda *_: sys.exit(NO_RAY))
signal.alarm(120)
try:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
except Exception as error:
    print(type(error).__name__, file=sys.stderr)
    sys.exit(NO_RAY)
signal.alarm(0)
try:
    for argument in sys.argv[1:]:
        study = StudyConfig.model_validate(json.loads(argument))
        outcome = run_study(make_plan(study, calls=Calls(*CALLS.values()), names=lambda: KNOWN))
        print(json.dumps({"done": outcome.done, "failed": outcome.failed, "code": outcome.exit_code}))
finally:
    ray.shutdown()
"""
)


@pytest.mark.slow
def test_a_study_on_ray_gives_the_results_of_a_local_one(tmp_path):
    """One process for both, with a time limit, so that a Ray that hangs fails the test and not the suite."""
    failing = {"fake": {"fail": {".holdfast.antibody.": "data", "ag_news.sft.": "killed"}}}

    def study(engine):
        return json.dumps({
            "models": ["embedded"], "tasks": ["sst2", "ag_news"], "references": False, "workers": 2, "engine": engine,
            "defenses": ["sft", "holdfast", {"name": "holdfast", "align": "antibody"}],
            "protocol": failing, "output_dir": str(tmp_path / engine),
        })  # fmt: skip

    done = subprocess.run(
        [sys.executable, "-c", CODE, study("ray"), study("local")],
        cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0"},
    )  # fmt: skip
    if done.returncode == NO_RAY:
        pytest.skip("no Ray can be started on this machine, which says nothing about the engine")
    assert done.returncode == 0, done.stderr[-2000:]
    on_ray, here = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    assert (len(on_ray["done"]), len(on_ray["failed"])) == (3, 3)
    assert {key: sorted(value) for key, value in on_ray.items() if key != "code"} == {
        key: sorted(value) for key, value in here.items() if key != "code"
    }
    assert on_ray["code"] in (3, 7)
    for id_ in on_ray["done"]:
        first, second = (json.loads((tmp_path / e / "results" / f"{id_}.json").read_text()) for e in ("ray", "local"))
        assert first["metrics"] == second["metrics"]
    errors = {e: {p.name: json.loads(p.read_text())["exit_code"] for p in (tmp_path / e / "errors").glob("*.json")}
              for e in ("ray", "local")}  # fmt: skip
    assert errors["ray"] == errors["local"]
    assert sorted(errors["ray"].values()) == [3, 3, 7]
