"""Models by the names that run files know: the small one is found, an adapter is refused before anything is asked."""

from __future__ import annotations

import logging

import pytest
from tests import asking_run, behaving
from tests.asking_run import few_probes

import holdfast as hf
from holdfast.core.errors import ConfigError
from holdfast.training import auto

__all__ = ["few_probes"]


def test_embedded_is_the_folder_of_the_small_model(tmp_path, monkeypatch):
    monkeypatch.setattr(auto, "embedded_model_dir", lambda: tmp_path)
    assert auto.start_of("embedded") == str(tmp_path)
    assert auto.start_of("owner/name") == "owner/name"


def test_an_adapter_is_refused_by_name(tmp_path):
    behaving.saved(tmp_path / "model")
    adapter = behaving.adapter(tmp_path / "adapter", tmp_path / "model")
    with pytest.raises(ConfigError, match="is an adapter, expected a model"):
        hf.SafeSFTTrainer(str(adapter), hf.SafeSFTConfig(str(tmp_path / "run"), use_cpu=True, bf16=False),
                          train_dataset=[{"prompt": "a", "completion": "b"}])  # fmt: skip


@pytest.mark.usefixtures("few_probes")
def test_asking_says_how_far_it_is_without_a_logger(tmp_path, monkeypatch, capsys, caplog):
    caplog.set_level(logging.WARNING, logger="holdfast")  # the command line, which listens, may have run before
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = behaving.saved(tmp_path / "model")
    task = asking_run.write_task(tmp_path / "task.jsonl", 105, 1000)
    from datasets import load_dataset

    hf.SafeSFTTrainer(
        str(model), hf.SafeSFTConfig(str(tmp_path / "run"), use_cpu=True, bf16=False, report_to="none"),
        train_dataset=load_dataset("json", data_files=str(task), split="train"),
    )  # fmt: skip
    said = capsys.readouterr().err
    assert "holdfast: asking the model: task prompts, " in said
