"""`holdfast study`: plan, run, go on, and say what failed; the work itself is fake."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from tests.unit.study.fakes import CALLS, SECRET

from holdfast_lab.cli.study import describe
from holdfast_lab.study.schedule import Calls, Progress

ROOT = Path(__file__).parents[3]


@pytest.fixture
def study_file(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("holdfast_lab.study.schedule.Calls", lambda: Calls(*CALLS.values()))

    def write(**changes):
        values = {
            "models": ["embedded"], "tasks": ["sst2"], "defenses": ["sft", "holdfast"], "workers": 2,
            "output_dir": str(tmp_path / "out"), **changes,
        }  # fmt: skip
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


def test_the_plan_counts_alignments_and_cells_and_runs_nothing(holdfast, study_file, tmp_path):
    code, out, _ = holdfast("study", study_file(), "seeds=[1, 2]", "--plan")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "1 alignment, 6 cells"
    assert lines[1].split() == ["model", "task", "label", "setting", "align", "poison_ratio", "seed", "state"]
    assert [line.split()[2] for line in lines[2:]] == ["base", "aligned", "sft", "holdfast", "sft", "holdfast"]
    assert lines[4].split() == ["SmolLM2-135M-Instruct", "sst2", "sft", "-", "sft", "0.5", "1", "to", "do"]
    assert not (tmp_path / "out").exists()


def test_the_plan_as_json_lists_what_is_left_out(holdfast, study_file):
    path = study_file(defenses=["sft", "vacine"], references=False)
    code, out, _ = holdfast("study", path, "--plan", "--skip-unknown", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["alignments"], len(found["cells"])) == (1, 1)
    assert [left["unknown"] for left in found["left_out"]] == [["defense 'vacine'"]]


def test_a_plan_says_why_the_study_would_be_refused_and_is_shown_all_the_same(holdfast, study_file, tmp_path):
    path = study_file(protocol={"fake": {"refuse": True}})
    code, out, err = holdfast("study", path, "--plan")
    assert code == 0
    assert len(out.splitlines()) == 6
    assert "as it stands this study would be refused: no judge\n  What to do: train one" in err
    code, out, _ = holdfast("study", path, "--plan", "--json")
    assert json.loads(out)["refused"] == {"what": "no judge", "remedy": "train one"}
    code, _, err = holdfast("study", path)
    assert code == 3
    assert "no judge" in err
    assert not (tmp_path / "out").exists()


def test_a_study_runs_to_its_end_and_then_has_nothing_to_do(holdfast, study_file, tmp_path):
    code, out, err = holdfast("study", study_file())
    assert code == 0
    folder = tmp_path / "out"
    assert out == f"4 of 4 cells done; {folder / 'results'}; tables: holdfast tables {folder}\n"
    assert "1 alignment, 4 cells" in err
    assert "0/4 done, 2 running" in err
    code, out, err = holdfast("study", study_file(), "--resume", "--json")
    assert code == 0
    assert len(json.loads(out)["done"]) == 4
    assert "running" not in err
    code, out, _ = holdfast("study", study_file(), "--plan")
    assert [line.split()[-1] for line in out.splitlines()[2:]] == ["done"] * 4


def test_failures_are_named_and_set_the_exit_code(holdfast, study_file):
    path = study_file(references=False, protocol={"fake": {"fail": {".holdfast.": "data"}}})
    code, out, err = holdfast("study", path)
    assert code == 3
    assert out.startswith("1 of 2 cells done; ")
    assert "row 3 is empty\n  What to do: remove it" in err
    assert "1 cell failed; --retry-failed runs again what failed" in err


def test_a_bug_keeps_its_message_out_of_the_terminal(holdfast, study_file):
    code, out, err = holdfast("study", study_file(references=False, protocol={"fake": {"fail": {".sft.p": "bug"}}}))
    assert code == 1
    assert SECRET not in out + err
    assert "log.txt" in err


def test_unknown_names_are_refused_before_anything_runs(holdfast, study_file, tmp_path):
    code, _, err = holdfast("study", study_file(tasks=["sst3"]))
    assert code == 2
    assert "task 'sst3': did you mean 'sst2'?" in err
    assert not (tmp_path / "out").exists()


def test_ray_that_is_not_installed_is_named(holdfast, study_file, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    code, _, err = holdfast("study", study_file(engine="ray", references=False))
    assert code == 7
    assert "pip install 'holdfast-llm[ray]'" in err


def test_progress_in_one_line():
    assert describe(Progress(6, 2, 0, ("a", "b"), None)) == "2/6 done, 2 running"
    assert describe(Progress(6, 2, 1, ("a",), 75.0)) == "2/6 done, 1 running, 1 failed, eta 0:01:15"
