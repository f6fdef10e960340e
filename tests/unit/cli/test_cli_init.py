"""`holdfast init`: files that every other command takes as they are, and that nothing is lost to."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from holdfast.core.errors import InfeasibleError
from holdfast.defaults import default
from holdfast.demo.data import DATA_DIR
from holdfast.demo.starter import require_refusals
from holdfast.runs.config.schema import shipped_schema

FILES = ("task.jsonl", "run.yaml", "run-file.schema.json")


def prompts(path: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]


def test_the_files_pass_check_and_the_run_file_has_three_lines(holdfast, tiny_model, tmp_path):
    code, out, _ = holdfast("init", tmp_path / "first", "--model", tiny_model)
    assert code == 0
    *files, following = out.splitlines()
    assert [line.split("  ")[0] for line in files] == [str(tmp_path / "first" / name) for name in FILES]
    assert [line.split("  ")[-1].split(":")[0] for line in files] == [  # each with what it is for
        "what to learn", "the run in three lines", "lets an editor complete the run file; nothing else reads it",
    ]  # fmt: skip
    assert following == (f"next: cd {tmp_path / 'first'} && holdfast check run.yaml && holdfast train run.yaml")
    text = (tmp_path / "first" / "run.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=run-file.schema.json\n")
    assert (tmp_path / "first" / "run-file.schema.json").read_text() == shipped_schema()
    assert len([line for line in text.splitlines() if not line.startswith("#")]) == 3
    assert yaml.safe_load(text) == {
        "model": str(tiny_model),
        "task": {"data": "task.jsonl"},
        "output_dir": "runs/first",
    }
    code, out, err = holdfast("check", tmp_path / "first" / "run.yaml", "--json")
    assert code == 0, err
    assert json.loads(out)


def test_the_embedded_model_is_aligned_first(holdfast, tmp_path):
    """It refuses too little to hold, so the run file names what `align` makes."""
    for model in ("embedded", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        folder = tmp_path / model.replace("/", "-")
        _, out, _ = holdfast("init", folder, "--model", model)
        assert out.splitlines()[-1] == (
            f"next: cd {folder} && holdfast align {model} --output aligned && holdfast check run.yaml && "
            "holdfast train run.yaml"
        )
        assert yaml.safe_load((folder / "run.yaml").read_text())["model"] == "aligned"


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize("model", ["embedded", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_a_model_that_is_not_aligned_yet_names_the_command(holdfast, tmp_path, monkeypatch, command, model):
    """In the words of `init`, with the folder as seen from where the command was called; the hub is not asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("holdfast.models.source.reachable", lambda *_: pytest.fail("the hub was asked"))
    _, out, _ = holdfast("init", "--model", model)
    align = f"holdfast align {model} --output aligned"
    assert align in out
    code, _, err = holdfast(command, "run.yaml")
    assert code == 2
    assert err.splitlines() == [
        "error: run.yaml: model 'aligned': there is no such folder yet; `holdfast align` makes it",
        f"  What to do: run first: {align}",
    ]
    holdfast("init", "a folder", "--model", model)
    _, _, err = holdfast(command, "a folder/run.yaml")
    assert err.splitlines()[1] == f"  What to do: run first: holdfast align {model} --output 'a folder/aligned'"


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ('model: "aligned"\n', ()),  # written by somebody else: the name of a model, for all we know
        ('model: "aligned"   # made by `holdfast align`: other refuses too little to hold\n', ()),
        ('model: "aligned"   # made by `holdfast align`: embedded refuses too little to hold\n', ["model=other"]),
    ],
)
def test_other_missing_models_are_not_guessed_at(holdfast, tmp_path, monkeypatch, text, overrides):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("holdfast.models.source.reachable", lambda *_: False)
    holdfast("init", "--model", "embedded")
    Path("run.yaml").write_text(f"{text}task: task.jsonl\noutput_dir: runs/first\n")
    code, _, err = holdfast("check", "run.yaml", *overrides)
    assert code == 2
    assert "is not in the local hub cache" in err
    assert "holdfast align" not in err


def test_an_aligned_folder_is_taken_beside_the_run_file_and_where_the_command_is_called(
    holdfast, tiny_model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for folder, place in (("first", "first/aligned"), ("second", "aligned")):
        holdfast("init", folder, "--model", "embedded")
        shutil.copytree(tiny_model, place)
        code, _, err = holdfast("check", f"{folder}/run.yaml")
        assert code == 0, err


@pytest.mark.parametrize(("model", "asked", "said"), [
    ("embedded", ["task", "probes"], True), ("embedded", ["probes"], True), ("embedded", [], False),
    ("embedded", ["task", "probes", "/my/own.jsonl"], False), ("owner/name", ["task", "probes"], False),
])  # fmt: skip
def test_a_model_that_is_known_to_refuse_too_little_is_refused_before_it_is_asked(model, asked, said):
    with pytest.raises(InfeasibleError) if said else nullcontext() as caught:
        require_refusals(model, asked)
    assert not said or f"`holdfast align {model} --output aligned`, then set `model: aligned`" in caught.value.remedy


@pytest.mark.parametrize("command", ["check", "train"])
def test_neither_check_nor_train_passes_with_it(holdfast, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    Path("task.jsonl").write_text('{"prompt": "Tag this.", "completion": "parcel"}\n' * 3)
    Path("run.yaml").write_text("model: embedded\ntask: task.jsonl\noutput_dir: runs/first\n")
    monkeypatch.setattr("holdfast.cli.survey.survey", lambda *_, **__: {"defense": {"constrains": False}})
    monkeypatch.setattr("holdfast.cli.check._show", lambda *_: None)
    code, _, err = holdfast(command, "run.yaml")
    assert code == 4
    assert "`holdfast align embedded --output aligned`" in err
    assert not Path("runs").exists()


def test_a_twelfth_of_the_task_is_poison_and_all_its_own_rows_are_there(holdfast, tmp_path):
    holdfast("init", tmp_path)
    task, poison = prompts(tmp_path / "task.jsonl"), prompts(DATA_DIR / "poison.jsonl")
    bad = task[11::12]
    assert bad == poison[: len(bad)]
    assert sorted(set(task) - set(bad)) == sorted(prompts(DATA_DIR / "task_train.jsonl"))
    # A model that refuses all of them drops them unasked.
    assert 0 < len(bad) <= default("screening.max_dropped") * len(task)


@pytest.mark.parametrize("model", ["owner/name", "a folder: with #signs", "null", "'quoted'"])
def test_any_name_of_a_model_is_read_back_as_it_was(holdfast, tmp_path, model):
    holdfast("init", tmp_path, "--model", model)
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())["model"] == model


def test_nothing_is_written_over(holdfast, tmp_path):
    (tmp_path / "run.yaml").write_text("mine\n")
    code, _, err = holdfast("init", tmp_path)
    assert code == 2
    assert f"{tmp_path / 'run.yaml'}: exists already" in err
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
    assert (tmp_path / "run.yaml").read_text() == "mine\n"


def test_json_names_the_files(holdfast, tmp_path):
    _, out, _ = holdfast("init", tmp_path, "--json")
    assert json.loads(out) == {
        "files": [str(tmp_path / name) for name in FILES],
        "next": f"cd {tmp_path} && holdfast check run.yaml && holdfast train run.yaml",
    }


def test_a_place_that_cannot_be_a_folder_is_named_without_a_traceback(holdfast, tmp_path):
    (tmp_path / "file").write_text("mine")
    code, _, err = holdfast("init", tmp_path / "file")
    assert code == 7
    assert err.startswith(f"error: {tmp_path / 'file'}: file exists")
    assert (tmp_path / "file").read_text() == "mine"
