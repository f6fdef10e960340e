"""The card's front matter as the hub's own library reads it: bound, alpha, kept behaviour, certificate hash, base."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from tests.unit.report.synthetic import Words, certificate, write_run
from tests.unit.report.test_report_behaviour import KEPT, watched

from holdfast.reporting.card import card_text
from holdfast.reporting.read import read_evidence


def read(run) -> Any:
    return ModelCard(card_text(read_evidence(run))).data


def results(run) -> dict:
    """By type of metric."""
    return {one.metric_type: one for one in read(run).eval_results or []}


def test_the_hub_reads_bound_alpha_behaviour_and_the_certificates_hash(tmp_path):
    run = watched(tmp_path, KEPT)
    stored, found = json.loads((run / "certificate.json").read_text()), results(run)
    assert set(found) == {"certified_upper_bound", "refusals_kept", "answers_kept"}
    bound = found["certified_upper_bound"]
    assert bound.metric_value == pytest.approx(stored["upper_bound"])
    assert bound.metric_args == {
        "alpha": 0.05,
        "confidence": 0.95,
        "certified": True,
        "certificate_sha256": stored["sha256"],
    }
    assert found["refusals_kept"].metric_value == 197 / 200
    assert found["answers_kept"].metric_args == {"kept": 198, "of": 200, "lower_bound_95": KEPT["answers_kept"].low}
    assert {one.task_type for one in found.values()} == {"text-generation"}


def test_a_certificate_of_other_weights_is_not_listed(tmp_path):
    run = write_run(tmp_path / "run", certified=certificate(Words()))
    assert set(results(run)) == {"certified_upper_bound"}
    (run / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "x", "r": 1}))
    assert results(run) == {}


def test_a_certificate_that_failed_says_so(tmp_path):
    run = write_run(tmp_path / "run", certified=certificate(Words(), regressions=20))
    bound = results(run)["certified_upper_bound"]
    assert bound.metric_args["certified"] is False
    assert bound.metric_value > 0.05


def test_steering_figures_are_no_claim(tmp_path):
    run = write_run(tmp_path / "run", certified=certificate(Words(), by="likelihood"))
    assert "model-index" not in card_text(read_evidence(run))


def test_base_model_and_tags(tmp_path):
    data = read(write_run(tmp_path / "a", Words(model="owner/base")))
    assert (data.base_model, data["base_model_relation"], data.library_name) == ("owner/base", "adapter", "peft")
    assert data.tags == ["holdfast", "safety", "trl", "sft", "lora"]
    run = write_run(tmp_path / "b", Words(model="owner/base"))
    settings = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(settings | {"lora": None}))
    (run / "result.json").unlink()  # it is bound to the settings
    data = read(run)
    assert (data["base_model_relation"], data.library_name) == ("finetune", "transformers")
    data = read(write_run(tmp_path / "c", Words(model="/home/alice/base")))
    assert data.base_model is None  # a folder of this machine
