"""A finished run on the hub: one commit of weights and card, and nothing of the run's prompts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import ModelCard
from tests.unit.report.synthetic import Words, certificate, write_plain_audit, write_run
from tests.unit.report.test_report_behaviour import KEPT, watched

from holdfast.core.errors import ConfigError, ResourceError
from holdfast.reporting.card import MARKER, push_to_hub

REPOSITORY = "somebody/a-model"
ADDRESS = f"https://huggingface.co/{REPOSITORY}"


@pytest.fixture
def hub(monkeypatch):
    """What was sent: the file's name -> its bytes."""
    sent: dict[str, Any] = {"asked": [], "files": {}, "fails": None}

    def create_repo(name: str, *, private: bool | None, exist_ok: bool) -> str:
        assert (name, exist_ok) == (REPOSITORY, True)
        sent["asked"].append(private)
        return ADDRESS

    def create_commit(name: str, operations: list[Any], *, commit_message: str) -> None:
        if sent["fails"] is not None:
            raise sent["fails"]
        for one in operations:
            with one.as_file() as file:
                sent["files"][one.path_in_repo] = file.read()

    about = SimpleNamespace(private=True)
    api = SimpleNamespace(create_repo=create_repo, create_commit=create_commit, repo_info=lambda name: about)
    sent["about"] = about
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    return sent


def test_the_card_has_bound_alpha_behaviour_and_hash(tmp_path, hub):
    run = watched(tmp_path, KEPT)
    (run / "adapter" / "checkpoint-2").mkdir()
    for name in ("training_args.json", "notes.txt", "rows.json"):  # the run's own, and somebody's
        (run / "adapter" / name).write_text("{}")
    assert push_to_hub(run, REPOSITORY) == ADDRESS
    assert set(hub["files"]) == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert hub["asked"] == [None]  # public or private, as its owner has set it
    weights = (run / "adapter" / "adapter_model.safetensors").read_bytes()
    assert hub["files"]["adapter_model.safetensors"] == weights
    data: Any = ModelCard(hub["files"]["README.md"].decode()).data
    found = {one.metric_type: one for one in data.eval_results}
    assert set(found) == {"certified_upper_bound", "refusals_kept", "answers_kept"}
    stored = json.loads((run / "certificate.json").read_text())
    bound = found["certified_upper_bound"]
    assert bound.metric_value == pytest.approx(stored["upper_bound"])
    assert (bound.metric_args["alpha"], bound.metric_args["certificate_sha256"]) == (0.05, stored["sha256"])
    assert found["refusals_kept"].metric_value == 197 / 200
    assert {"holdfast", "safety"} <= set(data.tags)


def test_a_card_of_somebodys_own_goes_along_as_it_is(tmp_path, hub):
    run = write_run(tmp_path / "run", certified=certificate(Words()))
    (run / "adapter" / "README.md").write_text("My own words.\n")
    push_to_hub(run, REPOSITORY, private=True)
    assert hub["files"]["README.md"] == b"My own words.\n"
    assert hub["asked"] == [True]


def test_links_are_not_followed(tmp_path, hub):
    run = write_run(tmp_path / "run", certified=certificate(Words()))
    secret = tmp_path / "secret.txt"
    secret.write_text("nobody should read this")
    for name in ("README.md", "notes.txt"):
        (run / "adapter" / name).unlink(missing_ok=True)
        (run / "adapter" / name).symlink_to(secret)
    push_to_hub(run, REPOSITORY)
    assert "notes.txt" not in hub["files"]
    assert MARKER in hub["files"]["README.md"].decode()
    assert b"nobody" not in b"".join(hub["files"].values())


def unfinished(folder: Path) -> Path:
    run = write_run(folder / "run", certified=certificate(Words()))
    (run / "result.json").unlink()
    return run


def without_weights(folder: Path) -> Path:
    run = write_run(folder / "run", certified=certificate(Words()))
    (run / "adapter" / "adapter_model.safetensors").unlink()
    return run


@pytest.mark.parametrize("make", [unfinished, without_weights, lambda folder: write_plain_audit(folder / "audit")])
def test_what_is_no_trained_model_is_refused(tmp_path, hub, make):
    run = make(tmp_path)
    with pytest.raises(ConfigError, match="has no trained model to push"):
        push_to_hub(run, REPOSITORY)
    assert hub["asked"] == []


def test_a_repository_that_is_public_gets_nothing_private(tmp_path, hub):
    run = write_run(tmp_path / "run", certified=certificate(Words()))
    hub["about"].private = False
    with pytest.raises(ConfigError, match="exists already and is public: nothing was pushed"):
        push_to_hub(run, REPOSITORY, private=True)
    assert hub["files"] == {}
    push_to_hub(run, REPOSITORY)
    assert "README.md" in hub["files"]


@pytest.mark.parametrize(("base", "sent"), [("/home/me/models/own", "own"), ("owner/name", "owner/name")])
def test_a_base_that_is_a_folder_goes_by_its_name(tmp_path, hub, base, sent):
    run = write_run(tmp_path / "run", certified=certificate(Words()))
    file = run / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))
    push_to_hub(run, REPOSITORY)
    assert json.loads(hub["files"]["adapter_config.json"])["base_model_name_or_path"] == sent
    assert json.loads(file.read_text())["base_model_name_or_path"] == base


def test_a_name_that_is_no_repository_is_refused(tmp_path, hub):
    with pytest.raises(ConfigError, match="is no repository of a hub") as caught:
        push_to_hub(tmp_path, "../elsewhere")
    assert "OWNER/NAME" in caught.value.remedy


def test_a_hub_that_refuses_is_one_line(tmp_path, hub):
    run = write_run(tmp_path / "run", certified=certificate(Words()))
    hub["fails"] = OSError("403 Forbidden\nwith a long story")
    with pytest.raises(ResourceError, match="was not pushed") as caught:
        push_to_hub(run, REPOSITORY)
    assert caught.value.what == f"{REPOSITORY} was not pushed: 403 Forbidden"
    assert "HF_TOKEN" in caught.value.remedy
