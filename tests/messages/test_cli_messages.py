"""What a user reads when something is wrong: the cause, the place, the remedy, and never the examples' text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from holdfast.cli.main import main

CANARY = "CANARY-TEXT-OF-AN-EXAMPLE"
WORDS = ("amber", "birch", "cedar", "daisy", "ebony", "fern", "grape", "hazel", "ivory", "jade", "kelp", "lemon")
RUN = """\
model: ./model
task: {data: task.jsonl}
safety: {data: safety.jsonl}
output_dir: OUT
"""


@pytest.fixture
def refused(tmp_path: Path, monkeypatch, capsys):
    """Write files, run a command, give its exit code and the lines on stderr; stdout must stay empty."""

    def call(run: str, *arguments: str, command: str = "train", **files: str) -> tuple[int, list[str]]:
        (tmp_path / "run.yaml").write_text(run.replace("OUT", str(tmp_path / "out")), encoding="utf-8")
        for name, text in files.items():
            (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["holdfast", command, str(tmp_path / "run.yaml"), *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        assert not (tmp_path / "out").exists()
        return int(stopped.value.code), err.replace(str(tmp_path), "").splitlines()

    return call


def rows(n: int, verb: str) -> str:
    return "".join(
        json.dumps({"prompt": f"{verb} {w} {w[::-1]} {w * 2}", "completion": f"{CANARY} {w}"}) + "\n" for w in WORDS[:n]
    )


def test_one_problem_is_two_lines(refused):
    assert refused(RUN + "sede: 3\n") == (
        2,
        ["error: /run.yaml: sede: unknown key", "  What to do: did you mean 'seed'?"],
    )


def test_several_problems_are_one_line_each(refused):
    code, lines = refused(RUN + "sede: 3\ntrain: {max_stepz: 3, per_device_train_batch_size: many}\n")
    assert code == 2
    assert lines == [
        "error: /run.yaml: 3 problems",
        "  - sede: unknown key (did you mean 'seed'?)",
        "  - train.max_stepz: unknown key (did you mean 'max_steps'?)",
        "  - train.per_device_train_batch_size: expected a whole number, found 'many'"
        " (set train.per_device_train_batch_size to a whole number)",
        "  What to do: correct these keys",
    ]


@pytest.mark.parametrize(
    ("run", "cause", "remedy"),
    [
        ("model: a\nmodel: b\n", "/run.yaml:2: key 'model' appears twice, first on line 1", "keep one of the two"),
        ("model: &x a\nrevision: *x\n", "/run.yaml:2: YAML aliases are not allowed", "write the value out"),
        ("model: !!python/name:os.system\n", "/run.yaml:1: YAML tag", "remove the tag"),
        ("model: a\n\tseed: 3\n", "line 2, column 1", "indent with spaces, not tabs"),
    ],
)
def test_yaml_refusals(refused, run, cause, remedy):
    code, lines = refused(run)
    assert code == 2
    assert len(lines) == 2
    assert cause in lines[0]
    assert remedy in lines[1]


def test_an_override_is_named(refused):
    code, lines = refused(RUN, "train.lerning_rate=1e-4")
    assert code == 2
    assert lines[0] == "error: /run.yaml with train.lerning_rate=1e-4: train.lerning_rate: unknown key"
    assert lines[1] == "  What to do: did you mean 'learning_rate'?"


def test_an_infeasible_start_is_refused_before_anything_is_read(refused):
    for unit, reachable in (("nll_token", True), ("kl_token", False)):
        code, lines = refused(RUN + f"constraint: {{tau: 0.1, beta: 1, unit: {unit}}}\n")
        assert code == 4
        assert len(lines) == 2
        assert "beta" in " ".join(lines)
        assert ("allow_infeasible_start" in " ".join(lines)) == reachable


@pytest.mark.parametrize("command", ["train", "check"])
def test_missing_data_names_the_file(refused, command):
    code, lines = refused(RUN, command=command, tasks=rows(3, "find"))
    assert code == 3
    assert "task.jsonl" in lines[0]
    assert "tasks.jsonl" in lines[1]


@pytest.mark.parametrize("command", ["train", "check"])
def test_bad_rows_are_named_by_line_without_their_text(refused, command):
    bad = rows(2, "find") + f'{{"prompt": "{CANARY}", "completion": 3}}\n'
    code, lines = refused(RUN, command=command, task=bad, safety=rows(12, "take"))
    assert code == 3
    assert "task.jsonl:3" in " ".join(lines)
    assert CANARY not in " ".join(lines)


def test_a_leak_is_counted_without_its_text(refused):
    code, lines = refused(RUN, task=rows(12, "take"), safety=rows(12, "take"))
    assert code == 3
    assert "on_leak: move" in lines[-1]
    assert CANARY not in " ".join(lines)


def test_a_missing_model_is_refused(refused):
    code, lines = refused(RUN, task=rows(3, "find"), safety=rows(12, "take"))
    assert code == 2
    warning, error, _ = lines
    assert warning.startswith("warning: safety: 2 certify prompts cannot certify alpha 5 %")
    assert "model" in error


def test_a_missing_run_file_names_its_neighbour(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.yaml").touch()
    monkeypatch.setattr(sys, "argv", ["holdfast", "train", str(tmp_path / "rnu.yaml")])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "did you mean 'run.yaml'?" in capsys.readouterr().err
