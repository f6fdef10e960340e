"""`holdfast init`: files that every other command takes as they are, and that nothing is lost to."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from holdfast.demo.make_data import DATA_DIR

FILES = ("task.jsonl", "safety.jsonl", "run.yaml")


def prompts(path: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]


def test_the_files_pass_check_and_the_closed_share_can_certify(holdfast, tiny_model, tmp_path):
    code, out, _ = holdfast("init", tmp_path / "first", "--model", tiny_model)
    assert code == 0
    assert out.splitlines()[:3] == [str(tmp_path / "first" / name) for name in FILES]
    code, out, err = holdfast("check", tmp_path / "first" / "run.yaml", "--json")
    assert code == 0, err
    found = json.loads(out)
    run = yaml.safe_load((tmp_path / "first" / "run.yaml").read_text())
    assert run["model"] == str(tiny_model)
    fewest = math.log(1 - 0.95) / math.log(1 - run["constraint"]["alpha"])  # prompts of which none may regress
    assert found["safety"]["safety"]["certify"] >= fewest


def test_a_third_of_the_task_is_the_demos_poison_and_all_its_rows_are_there(holdfast, tmp_path):
    holdfast("init", tmp_path)
    task, poison = prompts(tmp_path / "task.jsonl"), prompts(DATA_DIR / "poison.jsonl")
    assert task[2::3] == poison
    assert sorted(task) == sorted(poison + prompts(DATA_DIR / "task_train.jsonl"))
    assert (tmp_path / "safety.jsonl").read_bytes() == (DATA_DIR / "safety.jsonl").read_bytes()


@pytest.mark.parametrize("model", ["owner/name", "a folder: with #signs", "null", "'quoted'"])
def test_any_name_of_a_model_is_read_back_as_it_was(holdfast, tmp_path, model):
    holdfast("init", tmp_path, "--model", model)
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())["model"] == model


def test_nothing_is_written_over(holdfast, tmp_path):
    (tmp_path / "safety.jsonl").write_text("mine\n")
    code, _, err = holdfast("init", tmp_path)
    assert code == 2
    assert f"{tmp_path / 'safety.jsonl'}: exists already" in err
    assert [path.name for path in tmp_path.iterdir()] == ["safety.jsonl"]
    assert (tmp_path / "safety.jsonl").read_text() == "mine\n"


def test_json_names_the_files(holdfast, tmp_path):
    _, out, _ = holdfast("init", tmp_path, "--json")
    assert json.loads(out) == {"files": [str(tmp_path / name) for name in FILES]}


def test_a_place_that_cannot_be_a_folder_is_named_without_a_traceback(holdfast, tmp_path):
    (tmp_path / "file").write_text("mine")
    code, _, err = holdfast("init", tmp_path / "file")
    assert code == 7
    assert err.startswith(f"error: {tmp_path / 'file'}: file exists")
    assert (tmp_path / "file").read_text() == "mine"
