"""Runs on the protocol's roles, from training to a certificate and its verification."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.protocol_data import make_data_folder

from holdfast.core.errors import CheckpointError
from holdfast.records.certificate import load_certificate
from holdfast.runs.load_finished import finished_run

ROLES = "{safe: refusals, align: 16, monitor: 6, certify: 16, poison: 10, evaluation: 4}"
TEMPLATES = ("chat", "alpaca", "none")
UNITS = {"chat": "kl_token", "alpaca": "kl_first", "none": "kl_token"}


def write_run(path: Path, model: Path, template: str, *, roles: str = ROLES, seed: int = 42) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"""\
model: {model}
dtype: float32
template: {template}
task: {{name: sst2, poison_ratio: 0.5, size: 12}}
roles: {roles}
constraint: {{tau: 0.1, alpha: 0.2, unit: {UNITS[template]}}}
lora: {{r: 4, alpha: 8, target_modules: [q_proj, v_proj]}}
seed: {seed}
train: {{learning_rate: 1e-3, max_steps: 2, per_device_train_batch_size: 4, bf16: false, use_cpu: true,
  max_length: 512, dataloader_pin_memory: false}}
output_dir: {path.parent / "out"}
"""
    )
    return path


@pytest.fixture(scope="module")
def roomy_model(tmp_path_factory, tiny_model) -> Path:
    """The tiny model with room for the Alpaca preamble, which its tokenizer cuts into many tokens."""
    folder = Path(shutil.copytree(tiny_model, tmp_path_factory.mktemp("roomy") / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory, roomy_model):
    """The data, and a finished run for each template."""
    from holdfast.runs.config import load_config
    from holdfast.runs.pipeline import run

    root = tmp_path_factory.mktemp("protocol")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_DATA", str(make_data_folder(root / "data")))
        patch.setenv("HOLDFAST_CACHE", str(root / "cache"))
        for template in TEMPLATES:
            run(load_config(write_run(root / template / "run.yaml", roomy_model, template)))
    return root


@pytest.fixture
def at_home(world, tmp_path, monkeypatch) -> Path:
    """The runs with their data and a cache of this test's own."""
    monkeypatch.setenv("HOLDFAST_DATA", str(world / "data"))
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    for template in TEMPLATES:
        shutil.copytree(world / template / "out", tmp_path / template)
    return tmp_path


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_run_on_the_roles_is_certified_and_verified(at_home, holdfast, template):
    run = at_home / template
    code, out, err = holdfast("certify", run, "--by", "kl", "--json")
    assert code == 0, err
    record = json.loads(out)
    assert (record["unit"], record["n"], record["certified"]) == (UNITS[template], 16, True)
    assert record["leakage"]["checked"]
    assert record["settings"]["tokenizer"] == "after"
    (known,) = finished_run(run).sets
    assert Path(record["places"]["prompts"]) == Path(known.source)
    assert Path(known.source).stat().st_mode & 0o777 == 0o600
    code, out, err = holdfast("verify", run / "certificate.json", "--expect", record["sha256"])
    assert (code, err) == (0, "")
    assert "nothing was changed" in out


def test_the_template_of_training_is_the_one_that_is_measured(at_home, holdfast):
    found = {}
    for template in TEMPLATES:
        assert holdfast("certify", at_home / template, "--by", "kl", "--ledger", at_home / f"{template}.json")[0] == 0
        found[template] = load_certificate(at_home / template / "certificate.json").bound["template_sha256"]
    assert found["chat"] != found["alpaca"]


def test_runs_on_the_roles_share_their_openings(at_home, roomy_model, holdfast, world):
    """Another number of prompts is another file, and still the same prompts."""
    from holdfast.runs.config import load_config
    from holdfast.runs.pipeline import run

    assert holdfast("certify", at_home / "chat", "--by", "kl")[0] == 0
    code, _, err = holdfast("certify", at_home / "alpaca", "--by", "kl")
    assert code == 4
    assert "an undeclared opening never certifies" in err
    more = ROLES.replace("certify: 16", "certify: 18")
    run(load_config(write_run(at_home / "more" / "run.yaml", roomy_model, "chat", roles=more)))
    (ours,), (others,) = finished_run(at_home / "chat").sets, finished_run(at_home / "more" / "out").sets
    assert ours.source != others.source
    assert {e.id for e in ours.split.certify} < {e.id for e in others.split.certify}
    code, _, err = holdfast("certify", at_home / "more" / "out", "--by", "kl")
    assert code == 4
    assert "an undeclared opening never certifies" in err


def test_replies_of_a_run_are_certified_and_verified(at_home, holdfast):
    options = ("--judge", "refusal", "--set", "max_new_tokens=4")
    code, out, err = holdfast("certify", at_home / "alpaca", *options, "--json")
    assert code in (0, 4), err
    record = json.loads(out)
    assert (record["unit"], record["tau"], record["alpha"]) == ("on_policy", 0.1, 0.2)
    assert holdfast("verify", at_home / "alpaca", "--expect", record["sha256"])[0] == code


def test_the_stored_pairs_are_written_again_when_they_were_changed(at_home):
    (found,) = finished_run(at_home / "chat").sets
    text = Path(found.source).read_text()
    Path(found.source).write_text(text.replace("cannot", "can"))
    assert finished_run(at_home / "chat").sets[0].source == found.source
    assert Path(found.source).read_text() == text


def test_data_that_changed_since_training_is_refused(at_home, world, monkeypatch):
    other = shutil.copytree(world / "data", at_home / "data")
    place = other / "safety_tuned_llamas" / "safety_only_data_Instructions.json"
    place.write_text(place.read_text().replace("reason 1", "reason 7"))
    monkeypatch.setenv("HOLDFAST_DATA", str(other))
    with pytest.raises(CheckpointError, match="another split"):
        finished_run(at_home / "chat")
