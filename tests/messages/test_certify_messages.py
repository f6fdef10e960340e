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
    def call(*arguments: object, command: str = "certify") -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["holdfast", command, *map(str, arguments)])
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


PAIR = ["--before", "a", "--after", "b", "--prompts", "c"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--after, --before, --prompts must be given"),
        (["--before", "a", "--after", "b"], "--prompts must be given"),
        (["runs/x", "--before", "a"], "--before cannot be given together with a run"),
        (["runs/x", "--openings", 2], "declare openings in the run file"),
        (["runs/x"], "is not a run folder"),
        ([*PAIR, "--by", "likelihood", "--set", "unit=nll"], "unknown unit 'nll'"),
        ([*PAIR, "--by", "likelihood", "--set", "unit=kl_token"], "a divergence is certified --by kl"),
        ([*PAIR, "--by", "likelihood", "--set", "unit=on_policy"], "'on_policy' cannot be trained on"),
        ([*PAIR, "--alpha", 2], "alpha = 2.0"),
        ([*PAIR, "--confidence", 0.05], "1 - 0.05 may be meant"),
        ([*PAIR, "--set", "template=x"], "template is 'x'"),
        ([*PAIR, "--set", "tempalte=x"], "--set tempalte=x: no such setting"),
        ([*PAIR, "--set", "max_length=long"], "--set max_length=long: expected a whole number"),
        ([*PAIR, "--judge", "refusl"], "unknown judge 'refusl'"),
        ([*PAIR, "--judge", "refusal", "--tau", 2], "expected 0 <= tau < 1"),
        ([*PAIR, "--judge", "refusal", "--set", "unit=nll_sum"], "unit: a certificate by behaviour has no such limit"),
        ([*PAIR, "--tau", 0.1], "tau: a certificate by behaviour has no such limit"),
        ([*PAIR, "--by", "behavior"], "--by behavior is unknown"),
        ([*PAIR, "--by", "kl", "--also", "answers"], "a second claim is made by behaviour only"),
        ([*PAIR, "--also", "answer"], "unknown claim 'answer'"),
        ([*PAIR, "--drawn", "row"], "drawn 'row' is unknown"),
        ([*PAIR, "--strength"], "by behaviour of kind strength is not supported"),
        ([*PAIR, "--anytime"], "by behaviour of kind sequential is not supported"),
        ([*PAIR, "--pool", 900], "by behaviour of kind finite_pool is not supported"),
        ([*PAIR, "--anytime", "--strength"], "cannot be sequential and strength at once"),
        ([*PAIR, "--sign", "absent"], "the private key cannot be read"),
        (
            ["--before", "a.eval", "--after", "b.eval", "--prompts", "c"],
            "cannot be given together with evaluation logs",
        ),
    ],
)
def test_usage(refused, arguments, message):
    code, err = refused(*arguments)
    assert code == 2
    assert message in err
    assert "What to do: " in err


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["--safety", "f"], "--prompts FILE"),
        (["--verify", "c.json"], "holdfast verify PATH"),
        (["--regressions", 3, "--n", 9], "holdfast certify-counts K N"),
        (["--unit", "nll_sum"], "--by likelihood with --set unit=nll_sum"),
        (["--columns", "prompt=q"], "--set columns.prompt=NAME"),
        (["--max-length=9"], "--set max_length=VALUE"),
    ],
)
def test_a_spelling_of_the_first_release_names_the_new_one(refused, old, new):
    code, err = refused("--before", "a", "--after", "b", *old)
    assert code == 2
    assert new in err


def test_counts_too_small_name_the_number_needed(refused):
    code, err = refused(0, 58, command="certify-counts")
    assert code == 4
    assert "59 are needed" in err


def test_too_few_prompts(refused, model, tmp_path):
    code, err = refused(
        "--before", model, "--after", model, "--prompts", safety(tmp_path, 58), "--output", tmp_path / "out"
    )
    assert code == 4
    assert "58 groups of near-duplicate prompts cannot certify alpha = 0.05 at confidence 0.95" in err
    assert "59 are needed" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["safety.jsonl"], "nothing is left behind"


def test_a_leaked_prompt(refused, model, tmp_path):
    path = safety(tmp_path, 60)
    code, err = refused(
        "--before", model, "--after", model, "--prompts", path, "--train-data", path, "--output", tmp_path / "out"
    )
    assert code == 3
    assert "60 of 60 certify prompts occur in the training data" in err
    assert "a prompt that was trained on cannot certify" in err
    assert not (tmp_path / "out").exists()


def test_columns_of_the_training_data(refused, model, tmp_path):
    path, train = safety(tmp_path, 60), tmp_path / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    train.write_text("".join(json.dumps({"ask": r["prompt"], "say": "a"}) + "\n" for r in rows), encoding="utf-8")
    call = ("--before", model, "--after", model, "--prompts", path, "--train-data", train)
    code, err = refused(*call)
    assert (code, "--train-columns prompt=NAME --train-columns completion=NAME" in err) == (3, True)
    code, err = refused(*call, "--train-columns", "prompt=ask", "--train-columns", "completion=say")
    assert (code, "60 of 60 certify prompts occur in the training data" in err) == (3, True)
    code, err = refused(*call, "--train-columns", "prompt")
    assert (code, "--train-columns prompt: expected ours=theirs" in err) == (2, True)
    code, err = refused(*call[:6], "--train-columns", "prompt=ask")
    assert (code, "--train-columns without --train-data" in err) == (2, True)


def test_missing_data_and_models(refused, model, tmp_path):
    code, err = refused("--before", model, "--after", model, "--prompts", tmp_path / "absent.jsonl")
    assert (code, "does not exist" in err) == (3, True)
    code, err = refused("--before", model, "--after", tmp_path / "absent", "--prompts", safety(tmp_path, 60))
    assert (code, "there is no such folder" in err) == (2, True)


def test_no_certificate_to_verify(refused, tmp_path):
    code, err = refused(tmp_path / "certificate.json", command="verify")
    assert code == 6
    assert "there is no certificate at" in err
    assert "the same `holdfast certify` again goes on, or says why there is none" in err
    (tmp_path / "certificate.json").write_text("{}", encoding="utf-8")
    code, err = refused(tmp_path, command="verify")
    assert code == 6
    assert "version" in err


def test_categories_are_missing(refused, model, tmp_path):
    code, err = refused("--before", model, "--after", model, "--prompts", safety(tmp_path, 60), "--per-category")
    assert code == 3
    assert "60 of 60 prompts have no category" in err
    assert "--set columns.category=NAME" in err
