"""`holdfast judge train`: figures without a text, a folder that judges, and refusals that leave nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests import tiny_classifier
from tests.protocol_data import make_data_folder

from holdfast.judging.judge import open_judge
from holdfast_lab.cli.judge import describe

QUICK = ["--epochs", "1", "--batch-size", "16", "--rank", "2", "--max-length", "256", "--device", "cpu"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("judge")
    make_data_folder(root / "data")
    tiny_classifier.base(root / "base", corpus=["BEGINNING OF CONVERSATION: USER: How do I the ASSISTANT: Please ask"])
    return root


def test_training_prints_a_table_and_writes_a_judge(holdfast, place, tmp_path):
    output = tmp_path / "judge"
    code, out, err = holdfast(
        "judge", "train", "--output", output, "--base", place / "base", "--data-dir", place / "data", *QUICK
    )
    assert code == 0
    lines = out.splitlines()
    assert "6 left out, since their prompts are in the test split" in lines[0]
    assert lines[1] == "complete test split: 73 pairs, 45 unsafe"
    assert lines[2].startswith("AUROC ")
    assert [line.split()[0] for line in lines if "animal_abuse" in line] == ["animal_abuse"]
    assert len([line for line in lines if line.startswith(("calibrated", "uncalibrated"))]) == 2
    assert "training: 8 steps" in err
    for text in ("kettle", "Please ask the owner", "trick"):
        assert text not in out + err
    assert open_judge(str(output)).judge(["How?"], ["Please ask."])[0].probability is not None


def test_json_is_the_description(holdfast, place, tmp_path):
    output = tmp_path / "judge"
    code, out, _ = holdfast(
        "judge", "train", "--output-dir", output, "--base", place / "base", "--data-dir", place / "data",
        "--limit", "40", "--test-limit", "20", "--seed", "2", "--json", *QUICK,
    )  # fmt: skip
    assert code == 0
    found = json.loads(out)
    assert found.pop("folder") == str(output)
    assert found == json.loads((output / "judge.json").read_text())
    assert (found["figures"]["n"], found["training"]["seed"]) == (20, 2)
    assert describe(found)[1].startswith("PART of the test split: 20 pairs")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--epochs", "0"], 2, "epochs = 0, expected at least 1"),
        (["--base", "nowhere/at-all"], 2, "is not in the local hub cache"),
        (["--full", "--dtype", "bfloat16"], 2, "rounded away"),
        (["--data-dir", "no-such-folder"], 3, "does not exist or is no folder"),
    ],
    ids=["epochs", "base", "dtype", "data"],
)
def test_a_refusal_leaves_nothing_behind(holdfast, place, tmp_path, arguments, code, said):
    given = ["--base", place / "base", "--data-dir", place / "data", *QUICK, *arguments]
    found, out, err = holdfast("judge", "train", "--output-dir", tmp_path / "made" / "judge", *given)
    assert (found, out) == (code, "")
    assert said in err
    assert "What to do: " in err
    assert not (tmp_path / "made").exists()


def test_an_interrupted_training_exits_130(holdfast, place, tmp_path, monkeypatch):
    def stopped(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast_lab.evaluation.judge_run.fit", stopped)
    given = ["--base", place / "base", "--data-dir", place / "data", *QUICK]
    code, _, err = holdfast("judge", "train", "--output-dir", tmp_path / "judge", *given)
    assert code == 130
    assert "nothing was written" in err
    assert list(tmp_path.iterdir()) == []


def test_the_judges_are_listed(holdfast):
    code, out, _ = holdfast("ls", "judges", "--json")
    assert code == 0
    summaries = {entry["name"]: entry["summary"] for entry in json.loads(out)}
    assert summaries["beaver_dam"].startswith("beaver-dam-7b: 14 harm categories")
    assert "holdfast judge train" in summaries["trained"]


def test_help_shows_an_example(holdfast):
    code, out, _ = holdfast("judge", "train", "--help")
    assert code == 0
    assert "holdfast judge train --output " in out.split("Example:")[1]
