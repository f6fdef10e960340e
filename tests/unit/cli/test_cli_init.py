"""`holdfast init`: files that every other command takes as they are, and that nothing is lost to."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from tools import starter_aligned

from holdfast.core.errors import InfeasibleError
from holdfast.core.files import read_json
from holdfast.core.hashing import sha256_file, sha256_json
from holdfast.data.examples import prompt_text
from holdfast.data.near_duplicates import matches
from holdfast.defaults import default
from holdfast.demo.data import DATA_DIR
from holdfast.demo.starter import ADAPTER_DIR, require_refusals, write_starter
from holdfast.models.adapter import lineage
from holdfast.models.embedded import embedded_model_dir
from holdfast.runs.config import load_config
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
        "what to learn", "the run", "lets an editor complete the run file; nothing else reads it",
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


@pytest.mark.parametrize("model", ["embedded", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_the_embedded_model_comes_with_an_adapter_that_lets_it_refuse(holdfast, tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    _, out, _ = holdfast("init", "a folder", "--model", model)
    *files, following = out.splitlines()
    assert [line.split("  ")[0] for line in files] == [f"a folder/{name}" for name in (*FILES, "aligned")]
    assert following == "next: cd 'a folder' && holdfast check run.yaml && holdfast train run.yaml"
    assert {path.name for path in Path("a folder/aligned").iterdir()} == {path.name for path in ADAPTER_DIR.iterdir()}
    config = load_config(Path("a folder/run.yaml"))
    assert config.model == str(tmp_path / "a folder" / "aligned")
    assert config.refusal_prompts == ["task", "probes"]
    assert {block.limit for block in config.safety.values()} == {100, 20}
    found = lineage(config.model, None, False)
    assert (found.base, list(found.adapters)) == (embedded_model_dir(), [Path(config.model)])


def test_a_folder_is_taken_beside_the_run_file_and_where_the_command_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, place, model in (("first", "first/mine", str(tmp_path / "first" / "mine")), ("second", "mine", "mine")):
        write_starter(Path(folder), "mine")
        Path(place).mkdir()
        assert load_config(Path(folder, "run.yaml")).model == model


def test_the_adapter_is_as_its_provenance_says_and_made_with_the_tools_settings():
    made = read_json(ADAPTER_DIR / "provenance.json")
    assert made["command"] == starter_aligned.COMMAND
    assert (made["settings"], made["strength"]) == (starter_aligned.SETTINGS.shaping(), starter_aligned.STRENGTH)
    assert {name: sha256_file(ADAPTER_DIR / name) for name in made["files"]} == made["files"]
    used = starter_aligned.prompts(starter_aligned.SETTINGS)
    sets = {"refuse": used.refuse, **used.ordinary}
    assert made["prompts"] == {name: sha256_json([one.id for one in examples]) for name, examples in sets.items()}
    assert {name: counts["asked"] for name, counts in made["held_out"].items()} == {
        name: len(examples) for name, examples in used.held_out.items()
    }


def test_what_the_adapter_learnt_is_not_asked_to_measure_it():
    used = starter_aligned.prompts(starter_aligned.SETTINGS)
    trained = [prompt_text(one) for one in (*used.refuse, *(e for rows in used.ordinary.values() for e in rows))]
    asked = [prompt_text(one) for rows in used.held_out.values() for one in rows]
    assert list(matches(asked, trained)) == []


@pytest.mark.parametrize(("model", "asked", "said"), [
    ("embedded", ["task", "probes"], True), ("embedded", ["probes"], True), ("embedded", [], False),
    ("embedded", ["task", "probes", "/my/own.jsonl"], False), ("owner/name", ["task", "probes"], False),
])  # fmt: skip
def test_a_model_that_is_known_to_refuse_too_little_is_refused_before_it_is_asked(model, asked, said):
    with pytest.raises(InfeasibleError) if said else nullcontext() as caught:
        require_refusals(model, asked)
    assert not said or f"`holdfast align {model} --output aligned` teaches it anew" in caught.value.remedy


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
