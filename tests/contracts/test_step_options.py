"""How a step is computed can be said in a run file, and a wrong word there is refused by its key."""

from __future__ import annotations

import pytest
import yaml

from holdfast.core.errors import ConfigError
from holdfast.runs.config import config_from_dict
from holdfast.runs.config.resolve import training_arguments
from holdfast.training.step import ENGINES, TwoPassEngine

RUN = """
model: aligned
task: {data: task.jsonl}
safety: {data: safety.jsonl}
output_dir: out
train: {%s}
"""


def run_file(tmp_path, train: str):
    return config_from_dict(yaml.safe_load(RUN % train), folder=tmp_path)


@pytest.mark.parametrize(
    ("written", "name", "value"),
    [
        ("step: fused", "step", "fused"),
        ("step: two_pass", "step", "two_pass"),
        ("", "step", "auto"),
        ("skip_inactive_rows: on", "skip_inactive_rows", "on"),  # which YAML 1.1 reads as true
        ("skip_inactive_rows: 'off'", "skip_inactive_rows", "off"),
        ("step_graphs: off", "step_graphs", "off"),
        ("step_graphs: auto", "step_graphs", "auto"),
    ],
)
def test_a_run_file_may_say_how(tmp_path, written, name, value):
    assert getattr(training_arguments(run_file(tmp_path, written), elsewhere=True), name) == value


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("step: fuzed", ("train.step", "one of auto, fused, two_pass", "'fuzed'")),
        ("step: on", ("train.step", "one of auto, fused, two_pass", "true")),
        ("step_graphs: always", ("train.step_graphs", "one of auto, on, off", "'always'")),
        ("skip_inactive_rows: 1", ("train.skip_inactive_rows", "one of auto, on, off", "1")),
    ],
)
def test_a_wrong_word_is_refused_by_its_key(tmp_path, written, words):
    with pytest.raises(ConfigError) as caught:
        run_file(tmp_path, written)
    assert caught.value.exit_code == 2
    for word in words:
        assert word in str(caught.value)


def test_a_run_file_may_name_an_engine_of_another_package(tmp_path, monkeypatch):
    class Logged(TwoPassEngine):
        name = "logged"

    monkeypatch.setattr(ENGINES, "_entries", {**ENGINES._entries})
    ENGINES.register("logged")(Logged)
    assert training_arguments(run_file(tmp_path, "step: logged"), elsewhere=True).step == "logged"
