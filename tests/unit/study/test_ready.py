"""A study that could not be measured in the end is refused before anything is trained."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests import tiny
from tests.protocol_data import make_data_folder

from holdfast.core.errors import CheckpointError, ConfigError, HoldfastError
from holdfast.training.hooks import DEFENSES
from holdfast_lab.study.cell import require_ready
from holdfast_lab.study.cells import Cell, Defense, Model, reference_cell
from holdfast_lab.study.config import StudyConfig
from holdfast_lab.study.protocol import load_protocol
from holdfast_lab.study.schedule import make_plan, run_study

MODEL = Model("tiny", "embedded")
FITTING = {"align": 16, "monitor": 6, "certify": 4, "asked": 6, "harmful": 4, "poison": 10, "evaluation": 8}
GOOD: dict[str, Any] = {"evaluation": {"judge": "refusal", "task_examples": 60}, "roles": FITTING, "size": 20}


@pytest.fixture(autouse=True)
def _data(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("HOLDFAST_DATA", str(make_data_folder(tmp_path_factory.mktemp("data"))))


def cells(ratio: float = 0.5, **defense: Any) -> list[Cell]:
    chosen = Defense(**{"name": "holdfast", "label": "holdfast", **defense})
    return [reference_cell(MODEL, "sst2", "none"), Cell("defense", MODEL, "sst2", chosen, "sft", ratio, 42)]


def check(changes: dict[str, Any], *, preset: str = "small", of: list[Cell] | None = None, data: bool = True) -> None:
    require_ready(load_protocol(preset, {**GOOD, **changes}).model_dump(), of or cells(), data=data)


def test_what_can_be_run_is_let_through():
    check({})
    check({}, preset="paper")


@pytest.mark.parametrize("name", sorted(DEFENSES))
def test_every_defense_can_be_a_row(name):
    align = name if DEFENSES[name].stages == ("align",) else "sft"
    row = Cell("defense", MODEL, "sst2", Defense(name, name), align, 0.5, 42)
    check({}, of=[reference_cell(MODEL, "sst2", "none"), row])
    check({}, preset="paper", of=[row], data=False)


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        (None, "the study names no judge"),
        ("refusall", "unknown judge"),
        ("./nowhere", "there is no folder"),
        ({"name": "refusal", "speed": 1}, "has no option 'speed'"),
    ],
    ids=["none", "name", "folder", "option"],
)
def test_a_judge_that_cannot_be_opened_is_refused(judge, said):
    with pytest.raises(ConfigError, match=said):
        check({"evaluation": {"judge": judge}}, data=False)


def test_a_model_by_a_folder_that_is_not_there_is_refused(tmp_path):
    there, gone = (Model("tiny", str(tmp_path / name), None) for name in ("there", "gone"))
    (tmp_path / "there").mkdir()
    check({}, of=[reference_cell(there, "sst2", "none")], data=False)
    with pytest.raises(ConfigError, match=f"models: there is no folder {tmp_path / 'gone'}"):
        check({}, of=[reference_cell(gone, "sst2", "none")], data=False)


@pytest.fixture
def judge(tmp_path):
    """The folder of a trained judge, as far as it is read without its weights."""
    from holdfast.core.hashing import sha256_text
    from holdfast.judging.judges.classifier import CONVERSATION

    folder, base = tmp_path / "judge", str(tiny.saved(tmp_path / "base"))
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_text("weights")

    def write(ref: str = base, kind: str = "lora") -> str:
        description = {
            "version": 1, "kind": kind, "base": {"ref": ref, "revision": None, "weights_sha256": "0" * 64},
            "categories": ["a"], "input_format": CONVERSATION, "threshold": 0.4, "max_length": 64, "temperature": 1.0,
            "figures": {}, "data": {}, "files": {"adapter_model.safetensors": sha256_text("weights")},
        }  # fmt: skip
        (folder / "judge.json").write_text(json.dumps(description))
        return str(folder)

    return write


def test_a_trained_judge_is_looked_at_without_being_loaded(judge, tmp_path):
    check({"evaluation": {"judge": judge()}}, data=False)
    check({"evaluation": {"judge": {"name": "trained", "folder": judge()}}}, data=False)
    with pytest.raises(HoldfastError, match="no such folder"):
        check({"evaluation": {"judge": judge("./gone/base")}}, data=False)
    check({"evaluation": {"judge": judge("./gone/base", "full")}}, data=False)
    spec = {"name": "trained", "folder": judge("./gone/base"), "base": str(tmp_path / "base")}
    check({"evaluation": {"judge": spec}}, data=False)
    (tmp_path / "judge" / "adapter_model.safetensors").write_text("other weights")
    with pytest.raises(CheckpointError, match="not the one that was saved"):
        check({"evaluation": {"judge": judge()}}, data=False)


def test_more_held_out_examples_than_the_task_has_are_refused():
    with pytest.raises(ConfigError, match="61 held-out task examples are asked for, the test split has 60"):
        check({"evaluation": {"judge": "refusal", "task_examples": 61}})
    check({"evaluation": {"judge": "refusal", "task_examples": 61}}, data=False)


def test_more_poison_than_the_role_has_is_refused():
    check({}, of=cells(0.5))
    with pytest.raises(ConfigError, match="11 of 20 rows are to be poison, the poison role has 10"):
        check({}, of=cells(0.55))


def test_roles_that_the_data_cannot_fill_are_refused():
    with pytest.raises(HoldfastError, match="role evaluation: 5000 examples are asked for"):
        check({"roles": {**FITTING, "evaluation": 5000}})


@pytest.mark.parametrize(
    ("changes", "defense"),
    [
        ({"train": {"learning_rat": 1}}, {}),
        ({"align": {"train": {"learning_rat": 1}}}, {}),
        ({}, {"constraint": {"unit": "nll_tokens"}}),
        ({}, {"train": {"seed": 3}}),
    ],
    ids=["train", "align", "unit", "owned"],
)
def test_settings_that_no_run_accepts_are_refused(changes, defense):
    with pytest.raises(ConfigError):
        check(changes, of=cells(**defense), data=False)


def test_kept_replies_need_prompts():
    with pytest.raises(ConfigError, match=r"roles\.asked"):
        load_protocol("small", {"keep": "replies", "roles": {"asked": 0}})


@pytest.mark.parametrize("engine", ["endpoint", "vllm", "fast"])
def test_engines_that_a_study_cannot_use_are_refused(engine):
    with pytest.raises(ConfigError, match=r"evaluation\.engine"):
        load_protocol("small", {"evaluation": {"engine": engine}})


def test_a_study_without_a_judge_starts_and_writes_nothing(tmp_path):
    study = StudyConfig.model_validate(
        {"models": ["embedded"], "tasks": ["sst2"], "defenses": ["sft"], "output_dir": str(tmp_path / "out")}
    )
    with pytest.raises(ConfigError, match="names no judge"):
        run_study(make_plan(study))
    assert not (tmp_path / "out").exists()
