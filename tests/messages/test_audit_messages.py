"""What `holdfast audit` says when it cannot audit: the cause, the remedy, the exit code, and none of the text."""

from __future__ import annotations

import json
import sys

import pytest

from holdfast.cli.main import main

CANARY = "CANARY-TEXT-OF-AN-EXAMPLE"


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Run a command that is refused: its exit code and stderr; nothing is printed to stdout and nothing written."""

    def call(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["holdfast", "audit", *map(str, arguments), "--output", str(tmp_path / "out")])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        assert CANARY not in err
        assert not (tmp_path / "out").exists()
        return int(stopped.value.code), err

    return call


@pytest.fixture
def models(tmp_path):
    from tests import tiny

    return tiny.saved(tmp_path / "model")


def write(path, *entries):
    path.write_text("".join(json.dumps(row) + "\n" for row in entries), encoding="utf-8")
    return path


GOOD = {"prompt": "w1 w2", "completion": "w3"}


def test_neither_a_run_nor_models(refused):
    code, err = refused("--before", "a")
    assert code == 2
    assert err == (
        "error: --after, --safety not given\n"
        "  What to do: give --before, --after and --safety, or a finished run's folder\n"
    )


def test_both_a_run_and_models(refused):
    code, err = refused("runs/x", "--before", "a")
    assert code == 2
    assert "error: a run and --before are both given" in err


def test_a_run_and_another_way_to_read_it(refused):
    """The run file says how its models and data are read; an option that changed nothing would mislead."""
    code, err = refused("runs/x", "--dtype", "float32", "--template", "chat")
    assert code == 2
    assert "error: a run and --dtype, --template are both given" in err


def test_columns_without_an_equals_sign(refused, tmp_path):
    code, err = refused("--before", "a", "--after", "b", "--safety", "c", "--columns", "prompt")
    assert code == 2
    assert "error: --columns prompt: expected ours=theirs" in err


def test_bad_rows_come_before_bad_models(refused, tmp_path):
    path = write(tmp_path / "a.jsonl", GOOD, {"prompt": CANARY, "completion": " "}, {"prompt": CANARY})
    code, err = refused("--before", "no/model", "--after", "no/model", "--safety", path)
    assert code == 3
    assert f"error: {path}: 2 bad rows: {path}:2: the completion is empty or only whitespace" in err


def test_a_missing_model(refused, tmp_path):
    path = write(tmp_path / "a.jsonl", GOOD)
    code, err = refused("--before", tmp_path / "nothing", "--after", tmp_path / "nothing", "--safety", path)
    assert code == 2
    assert "there is no such folder" in err


def test_unknown_choices_name_the_nearest(refused, models, tmp_path):
    path = write(tmp_path / "a.jsonl", GOOD)
    shared = ("--before", models, "--after", models, "--safety", path)
    for option, value, nearest in (
        ("--unit", "nll_tokens", "nll_token"),
        ("--template", "chatt", "chat"),
        ("--tokenizer", "befor", "before"),
    ):
        code, err = refused(*shared, option, value)
        assert code == 2, err
        assert f"did you mean {nearest!r}?" in err
    code, err = refused(*shared, "--dtype", "float16")
    assert code == 2
    assert "dtype 'float16' is not supported" in err


def test_differing_tokenizers(refused, models, tmp_path):
    from tests import tiny

    other = tiny.saved(tmp_path / "other", seed=1)
    changed = tiny.tokenizer()
    changed.chat_template = "{{ messages }}"
    changed.save_pretrained(other)
    path = write(tmp_path / "a.jsonl", GOOD)
    code, err = refused("--before", models, "--after", other, "--safety", path)
    assert code == 6
    assert "error: before and after have different chat templates: degradations would compare other tokens" in err
    assert "`--tokenizer before`" in err


def test_text_examples_without_prompts(refused, models, tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": CANARY})
    code, err = refused("--before", models, "--after", models, "--safety", path)
    assert code == 3
    assert f"{path}:1: text examples have no prompt" in err


def test_an_example_without_a_scored_token_leaves_parts_only(models, tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "a.jsonl", GOOD)
    monkeypatch.setattr(
        sys, "argv",
        ["holdfast", "audit", "--before", str(models), "--after", str(models), "--safety", str(path),
         "--max-length", "2", "--device", "cpu", "--output", str(tmp_path / "out")],
    )  # fmt: skip
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 3
    assert "raise max_length" in capsys.readouterr().err
    assert not (tmp_path / "out" / "audit.json").exists()
