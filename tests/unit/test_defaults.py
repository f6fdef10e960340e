"""The defaults of a run file: where they come from, and where they do not apply."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError
from holdfast.defaults import TABLE, block, constraint_defaults, default, train_defaults
from holdfast.defenses.holdfast import Holdfast
from holdfast.runs.config import config_from_dict, load_config
from holdfast.runs.config.blocks import SPELLED_OUT
from holdfast.runs.config.presets import PRESETS
from holdfast.runs.config.problems import field_names
from holdfast.runs.config.resolve import defaults, resolved, training_arguments
from holdfast.runs.config.schema import LoraBlock, RunConfig
from holdfast.screening.settings import AUTO, ScreeningSettings
from holdfast.training.config import SafeSFTConfig
from holdfast_lab.study.config import load_study
from holdfast_lab.study.protocol import align_settings, finetune_settings, load_protocol

THREE = {"model": "owner/name", "task": "train.jsonl", "output_dir": "runs/first"}
STUDIES = sorted((Path(__file__).parents[2] / "studies").glob("*.yaml"))


def test_every_default_is_a_field_with_a_source_named_once():
    assert len({entry.key for entry in TABLE}) == len(TABLE)
    for entry in TABLE:
        block, _, field = entry.key.rpartition(".")
        known = {"train": field_names(SafeSFTConfig), "lora": list(LoraBlock.model_fields)}.get(block)
        assert known is None or field in known
        assert entry.source


def test_a_run_file_that_is_silent_gets_the_table_and_its_config_yaml_shows_it():
    config = config_from_dict(THREE)
    values = resolved(config)
    for entry in TABLE:
        block, _, field = entry.key.rpartition(".")
        if block in ("train", "lora"):
            assert values[block][field] == entry.value, entry.key
    arguments = training_arguments(config, elsewhere=True)
    assert {name: getattr(arguments, name) for name in train_defaults(full=False)} == train_defaults(full=False)
    assert arguments.get_warmup_steps(1000) == 1000 * default("train.warmup_steps")


def test_the_page_about_run_files_spells_out_the_table():
    page = (Path(__file__).parents[2] / "docs" / "run-file.md").read_text(encoding="utf-8")
    short, whole = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[:2])
    assert set(short) == set(THREE)
    assert resolved(config_from_dict(whole)) == resolved(config_from_dict(short))
    assert {"name": "holdfast", **block("defense")} == whole["defense"]
    assert {**block("train"), **whole["train"]} == block("train")


def test_python_and_evidence_read_the_table():
    assert constraint_defaults()["unit"] == "kl_token"
    unit = {"unit": "nll_token"}
    assert constraint_defaults(kl=False) == constraint_defaults() | unit
    table = {name: value for name, value in constraint_defaults().items() if name != "unit"}
    assert defaults(ChanceConstraint) | table == defaults(ChanceConstraint)
    assert defaults(Holdfast.Config) == block("defense")


def test_what_the_file_says_wins():
    config = config_from_dict({**THREE, "train": {"learning_rate": 1e-5, "warmup_steps": 7}, "lora": {"r": 4}})
    assert (config.train["learning_rate"], config.train["warmup_steps"]) == (1e-5, 7)
    assert config.train["num_train_epochs"] == default("train.num_train_epochs")
    assert config.lora is not None
    assert (config.lora.r, config.lora.alpha) == (4, default("lora.alpha"))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_complete_by_itself(preset):
    config = config_from_dict({**THREE, "preset": preset})
    stated = {e.key.removeprefix("train."): e.value for e in PRESETS[preset] if e.key.startswith("train.")}
    assert config.train == stated


def test_the_rate_of_an_adapter_is_not_that_of_all_parameters():
    full = config_from_dict({**THREE, "lora": None})
    assert "learning_rate" not in full.train
    assert resolved(full)["train"]["learning_rate"] == defaults(SafeSFTConfig)["learning_rate"]


def test_python_keeps_the_defaults_of_trl():
    from trl import SFTConfig

    theirs, ours = defaults(SFTConfig), defaults(SafeSFTConfig)
    assert {name: ours[name] for name in train_defaults(full=False) if name in theirs} == {
        name: theirs[name] for name in train_defaults(full=False) if name in theirs
    }
    assert ours["safety_batch_size"] is None


def test_the_limits_of_the_table_are_those_of_python():
    assert ChanceConstraint(unit="nll_token").alpha == default("constraint.refusals.alpha")


def test_python_screens_as_a_run_file_does():
    screening, monitor = ScreeningSettings(), default("monitor.prompts")
    assert screening.max_dropped == default("screening.max_dropped")
    assert (screening.max_prompts, screening.monitor_prompts) == (default("screening.max_prompts"), monitor)
    assert {name: (list(one.prompts), one.keep) for name, one in AUTO.items()} == {
        name: (block["prompts"], block["keep"]) for name, block in SPELLED_OUT.items()
    }


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_a_studys_cells_train_with_the_protocol_alone(file):
    study = load_study(file)
    protocol = load_protocol(study.preset, study.protocol)
    cell = {"task": "sst2", "poison_ratio": 0.5, "seed": 1, "defense": {"name": "holdfast"}}
    kept = Path("/kept/safety.jsonl")
    tuned = finetune_settings(protocol, cell, model="owner/aligned", output_dir=Path("out"), kept=kept)
    aligned = align_settings(protocol, model="owner/base", revision=None, defense="sft", output_dir=Path("out"))
    for settings in (tuned, aligned):
        config = config_from_dict(settings, complete=True)
        assert config.train == settings["train"]
        assert not config.asks


def test_cells_and_alignments_are_run_with_nothing_added(monkeypatch, tmp_path):
    from holdfast_lab.study import cell

    class SeenError(Exception):
        pass

    seen: list[RunConfig] = []

    def note(config: RunConfig, **_: object) -> None:
        seen.append(config)
        raise SeenError

    monkeypatch.setattr("holdfast.runs.pipeline.run", note)
    protocol = load_protocol("paper", {})
    node = {"protocol": protocol.model_dump(), "model": {"ref": "owner/base"}, "align": "sft"}
    with pytest.raises(SeenError):
        cell.run_alignment(node, tmp_path / "align")
    chosen = {"name": "holdfast", "label": "holdfast", "setting": ""}
    work = cell._Cell(
        protocol, {"task": "sst2", "poison_ratio": 0.5, "seed": 1, "defense": chosen}, tmp_path / "cell", tmp_path
    )
    with pytest.raises(SeenError):
        work.train()
    added = set(train_defaults(full=False)) - set(protocol.train)
    assert added  # or this shows nothing
    for config in seen:
        assert not added & set(config.train)
    assert len(seen) == 2


@pytest.mark.parametrize(("processes", "rows"), [(1, 4), (2, 4), (3, 6), (8, 8)])
def test_the_default_safety_batch_is_shared_equally_by_any_number_of_processes(monkeypatch, processes, rows):
    monkeypatch.setattr(SafeSFTConfig, "world_size", processes)
    assert training_arguments(config_from_dict(THREE), elsewhere=True).safety_batch_size == rows
    written = config_from_dict({**THREE, "train": {"safety_batch_size": 5}})
    assert training_arguments(written, elsewhere=True).safety_batch_size == 5


def test_the_old_name_of_skip_inactive_rows_is_refused_with_the_new_one(tmp_path):
    values = resolved(config_from_dict(THREE))
    values["train"]["screening"] = values["train"].pop("skip_inactive_rows")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"train\.screening: unknown key") as caught:
        load_config(file)
    assert "`train.skip_inactive_rows`" in caught.value.remedy
