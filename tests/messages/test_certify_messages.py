"""What `holdfast certify` says when it refuses: cause, remedy, exit code; never the examples' text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests import tiny

from holdfast.cli.main import main

CANARY = "w13 w17 w19 w23"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.saved(tmp_path_factory.mktemp("messages") / "model")


@pytest.fixture
def refused(monkeypatch, capsys):
    def call(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["holdfast", "certify", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        assert CANARY not in err
        return int(stopped.value.code or 0), err

    return call


def safety(folder: Path, n: int, **extra: str) -> Path:
    path = folder / "safety.jsonl"
    rows = [row | {"completion": CANARY} | extra for row in tiny.rows(n, seed=1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--before, --after, --safety must be given"),
        (["--before", "a", "--after", "b"], "--safety must be given"),
        (["--regressions", 3], "--n must be given"),
        (["--n", 3], "--regressions must be given"),
        (["--regressions", 3, "--n", 9, "--tau", 1], "--tau cannot be given together with --regressions"),
        (["--verify", "c.json", "--strength"], "--strength cannot be given together with --verify"),
        (["runs/x", "--before", "a"], "--before cannot be given together with RUN"),
        (["runs/x", "--openings", 2], "--openings cannot be given together with RUN"),
        (["runs/x"], "is not a run folder"),
        (["--before", "a", "--after", "b", "--safety", "c", "--unit", "nll"], "unknown unit 'nll'"),
        (["--before", "a", "--after", "b", "--safety", "c", "--alpha", 2], "alpha = 2.0"),
        (["--before", "a", "--after", "b", "--safety", "c", "--confidence", 0.05], "1 - 0.05 may be meant"),
        (["--before", "a", "--after", "b", "--safety", "c", "--template", "x"], "template is 'x'"),
        (["--regressions", 1, "--n", 9, "--confidence", 2], "confidence = 2.0"),
        (["--before", "a", "--after", "b", "--safety", "c", "--unit", "on_policy"], "'on_policy' cannot be trained on"),
        (["--before", "a", "--after", "b", "--safety", "c", "--judge", "refusl"], "unknown judge 'refusl'"),
        (["--before", "a", "--after", "b", "--safety", "c", "--judge", "refusal", "--tau", 2], "expected 0 <= tau < 1"),
        (
            ["--before", "a", "--after", "b", "--safety", "c", "--judge", "refusal", "--unit", "nll_sum"],
            "--unit cannot be given with --judge",
        ),
        (
            ["--before", "a", "--after", "b", "--safety", "c", "--max-new-tokens", 9],
            "--max-new-tokens cannot be given without --judge",
        ),
        (["runs/x", "--tau", 0.1], "--tau cannot be given without --judge"),
        (["--verify", "c.json", "--judge", "refusal"], "--judge cannot be given together with --verify"),
    ],
)
def test_usage(refused, arguments, message):
    code, err = refused(*arguments)
    assert code == 2
    assert message in err
    assert "What to do: " in err


def test_counts_too_small_name_the_number_needed(refused):
    code, err = refused("--regressions", 0, "--n", 58)
    assert code == 4
    assert "59 are needed" in err


def test_too_few_prompts(refused, model, tmp_path):
    code, err = refused(
        "--before", model, "--after", model, "--safety", safety(tmp_path, 58), "--output", tmp_path / "out"
    )
    assert code == 4
    assert "58 prompts cannot certify alpha = 0.05 at confidence 0.95, even with no regression: 59 are needed" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["safety.jsonl"], "nothing is left behind"


def test_a_leaked_prompt(refused, model, tmp_path):
    path = safety(tmp_path, 60)
    code, err = refused(
        "--before", model, "--after", model, "--safety", path, "--train-data", path, "--output", tmp_path / "out"
    )
    assert code == 3
    assert "60 of 60 certify prompts occur in the training data" in err
    assert "a prompt that was trained on cannot certify" in err
    assert not (tmp_path / "out").exists()


def test_missing_data_and_models(refused, model, tmp_path):
    code, err = refused("--before", model, "--after", model, "--safety", tmp_path / "absent.jsonl")
    assert (code, "does not exist" in err) == (3, True)
    code, err = refused("--before", model, "--after", tmp_path / "absent", "--safety", safety(tmp_path, 60))
    assert (code, "there is no such folder" in err) == (2, True)


def test_no_certificate_to_verify(refused, tmp_path):
    code, err = refused("--verify", tmp_path / "certificate.json")
    assert code == 6
    assert "cannot be read as a certificate" in err
    (tmp_path / "certificate.json").write_text("{}", encoding="utf-8")
    code, err = refused("--verify", tmp_path)
    assert code == 6
    assert "version" in err


def test_categories_are_missing(refused, model, tmp_path):
    code, err = refused("--before", model, "--after", model, "--safety", safety(tmp_path, 60), "--per-category")
    assert code == 3
    assert "60 of 60 prompts have no category" in err
    assert "--columns category=NAME" in err
