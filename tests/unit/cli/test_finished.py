"""A finished run, read again for its evidence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from tests.unit.report.synthetic import change

from holdfast.core.errors import CheckpointError, ConfigError, DataError, UnsupportedError
from holdfast.core.hashing import sha256_file
from holdfast.data.split_record import load_record
from holdfast.models.content import content_of
from holdfast.records.audit import Audit
from holdfast.records.run_record import settings_sha256
from holdfast.runs.load_finished import finished_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory, deep_model, write_run_file):
    """A run of two steps, in its own folder."""
    from holdfast.runs.config import load_config
    from holdfast.runs.pipeline import run

    folder = tmp_path_factory.mktemp("finished")
    path = write_run_file(folder, deep_model)
    overrides = ["train.max_steps=2", "train.max_length=64", "safety.openings=3"]
    return run(load_config(path, overrides)).folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """The same run in a folder that a test may damage; its data stays where it was."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def test_the_set_is_what_training_used(finished, deep_model):
    (found,) = finished_run(finished).sets
    assert (found.name, found.folder, found.after) == ("safety", finished, finished / "adapter")
    assert (found.before, found.revision, found.dtype) == (str(deep_model), None, "float32")
    assert (found.constraint.tau, found.constraint.alpha) == (0.1, 0.2)
    assert (found.max_length, found.openings, found.template) == (64, 3, "chat")
    assert found.source == str(finished.parent / "safety.jsonl")
    assert found.split.record == load_record(finished)


def test_a_moved_run_folder_is_read_all_the_same(copy):
    assert finished_run(copy).sets[0].after == copy / "adapter"


def bound_anew(run: Path) -> None:
    """Compute the hashes of edited settings again, as a forger would, so that other checks are reached."""
    config = run / "config.yaml"
    hashes = {"config_sha256": settings_sha256(yaml.safe_load(config.read_text()))}
    change(run / "result.json", **hashes, config_file_sha256=sha256_file(config))


def test_edited_settings_are_refused(copy):
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace("seed: 42", "seed: 43"))
    with pytest.raises(CheckpointError, match=r"config\.yaml was changed after the run was finished"):
        finished_run(copy)


def test_changed_data_is_refused(finished, copy, tmp_path):
    text = (copy / "config.yaml").read_text()
    source = finished.parent / "safety.jsonl"
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    rows[0]["completion"] += " ever"
    changed = tmp_path / "changed.jsonl"
    changed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (copy / "config.yaml").write_text(text.replace(str(source), str(changed)))
    bound_anew(copy)
    with pytest.raises(CheckpointError, match="another split"):
        finished_run(copy)
    changed.unlink()
    with pytest.raises(DataError, match="does not exist"):
        finished_run(copy)


@pytest.mark.parametrize(
    ("missing", "error", "message"),
    [
        ("config.yaml", ConfigError, "not a run folder"),
        ("result.json", ConfigError, "not finished"),
        ("splits.json", CheckpointError, "splits.json"),
        ("adapter", CheckpointError, "adapter is missing"),
    ],
)
def test_what_is_missing_is_named(copy, missing, error, message):
    path = copy / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(error, match=message):
        finished_run(copy)


def test_a_quantised_base_is_refused(copy):
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace("quantization: null", "quantization: 4bit"))
    bound_anew(copy)
    with pytest.raises(UnsupportedError, match="4bit base"):
        finished_run(copy)


def test_training_leaves_an_audit_that_agrees_with_its_result(finished):
    found = Audit.load(finished)
    result = json.loads((finished / "result.json").read_text())["safety"]["safety"]
    record = load_record(finished)
    for role in ("constraint", "monitor"):
        assert found.roles[role]["violation_rate"] == result[role]["violation_rate"]
        assert found.roles[role]["cvar"] == pytest.approx(result[role]["cvar"], rel=1e-12)
    listed = [(row["role"], row["id"]) for row in found.table.select(["role", "id"]).to_pylist()]
    assert sorted(listed) == sorted((role, id_) for role in ("constraint", "monitor") for id_ in record.ids[role])
    assert found.mode == "training"
    assert found.role == "monitor"


def test_the_written_adapter_measures_as_the_trained_model_did(finished, tmp_path, holdfast):
    code, out, _ = holdfast("audit", finished, "--output", tmp_path / "again", "--json")
    assert code == 0
    again, trained = Audit.load(tmp_path / "again"), Audit.load(finished)
    for unit in ("nll_token", "nll_sum", "nll_first"):
        np.testing.assert_allclose(again.degradations(unit), trained.degradations(unit), atol=1e-5)
    assert np.abs(trained.degradations("nll_token")).max() > 1e-4, "two steps must have moved something"
    assert (again.unit, trained.unit) == ("kl_token", "kl_token"), "holdfast's own unit where a file names none"
    np.testing.assert_allclose(again.degradations(), trained.degradations(), rtol=1e-2, atol=2e-8)
    assert trained.degradations().max() > 1e-6, "KL is of second order in a step"
    assert json.loads(out)["violation_rate"] == trained.violation_rate
    assert again.before["sha256"] == trained.before["sha256"]
    assert again.after["sha256"] == trained.after["sha256"]


def test_code_that_runs_counts_in_the_audit_that_training_leaves(tmp_path, deep_model, write_run_file, holdfast):
    """The same model has one sha256 in audit and certificate, or a report would call them two."""
    model = Path(shutil.copytree(deep_model, tmp_path / "model"))
    (model / "modeling_own.py").write_text("# runs\n")
    path = write_run_file(tmp_path, model)
    assert holdfast("train", path, "train.max_steps=1", "--trust-remote-code")[0] in (0, 4)
    trained = Audit.load(tmp_path / "out")
    assert trained.before["sha256"] == content_of(model, trust_remote_code=True).sha256
    assert trained.after["sha256"] == content_of(tmp_path / "out" / "adapter", trust_remote_code=True).sha256
