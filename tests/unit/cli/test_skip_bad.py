"""`--skip-bad` and dropped duplicates: what `check` and `train` say, and what the run folder keeps."""

from __future__ import annotations

import json

import pytest
import yaml

from holdfast.records.run_record import settings_sha256
from holdfast.runs.config import load_config
from holdfast.runs.config.resolve import resolved


def hash_of(config):
    return settings_sha256(resolved(config))


@pytest.fixture
def damaged(run_file, tmp_path):
    """Two bad rows among the task's; three rows of the safety set twice, one prompt with two replies."""
    task, safety = tmp_path / "task.jsonl", tmp_path / "safety.jsonl"
    lines = task.read_text().splitlines()
    task.write_text("\n".join([*lines[:7], "{secret", '{"prompt": "secret", "completion": ""}', *lines[7:]]))
    rows = safety.read_text().splitlines()
    safety.write_text("\n".join([*rows, *rows[:3], json.dumps({**json.loads(rows[0]), "completion": "Another."})]))
    return run_file


@pytest.mark.parametrize("command", ["check", "train"])
def test_bad_rows_are_refused_by_default_and_the_way_out_is_named(damaged, holdfast, command, tmp_path):
    code, _, err = holdfast(command, damaged)
    assert code == 3
    assert "2 bad rows" in err
    assert f"{tmp_path / 'task.jsonl'}:8" in err
    assert "--skip-bad" in err
    assert not (tmp_path / "out").exists()


def test_check_shows_what_is_left_out(damaged, holdfast, tmp_path):
    code, out, _ = holdfast("check", damaged, "--skip-bad")
    assert code == 0
    assert "task: 2 malformed rows skipped:" in out
    assert f"{tmp_path / 'task.jsonl'}:8: not valid JSON" in out
    assert f"{tmp_path / 'task.jsonl'}:9: the completion is empty" in out
    assert "safety: 3 duplicate rows dropped" in out
    assert "safety: 1 prompt with more than one completion" in out
    assert "secret" not in out


def test_train_records_what_is_left_out_and_resumes_it(damaged, holdfast, tmp_path):
    code, out, err = holdfast("train", damaged, "train.max_steps=2", "--skip-bad")
    assert code == 0, err
    assert "task: 2 malformed rows skipped:" in out
    assert "safety: 3 duplicate rows dropped" in out
    folder = tmp_path / "out"
    data = json.loads((folder / "result.json").read_text())["data"]
    assert data["task"]["rows"] == 60
    assert data["task"]["skipped"] == 2
    assert [row.split(": ")[0] for row in data["task"]["skipped_rows"]] == [
        f"{tmp_path / 'task.jsonl'}:{line}" for line in (8, 9)
    ]
    assert data["safety"]["safety"] == {
        "rows": 61, "skipped": 0, "duplicates_dropped": 3, "contradictory_prompts": 1,
    }  # fmt: skip
    assert yaml.safe_load((folder / "config.yaml").read_text())["task"]["skip_bad"] is True
    assert holdfast("train", folder / "config.yaml", "--resume")[0] == 0  # the stored settings are enough
    code, _, err = holdfast("train", damaged, "train.max_steps=2", "--resume")
    assert code == 6, err
    assert "skip_bad: stored True, now None" in err


def test_the_card_says_what_was_left_out(damaged, holdfast, tmp_path):
    assert holdfast("train", damaged, "train.max_steps=1", "--skip-bad")[0] == 0
    assert holdfast("report", tmp_path / "out")[0] == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "task data, malformed rows skipped: 2" in card.replace("\\", "")
    assert "safety data, duplicate rows dropped: 3" in card.replace("\\", "")


def test_settings_without_the_option_are_stored_and_hashed_as_before(run_file):
    config = load_config(run_file)
    assert "skip_bad" not in json.dumps(resolved(config))
    skipping = config.skipping_bad_rows()
    assert [skipping.task.skip_bad, skipping.safety["safety"].skip_bad] == [True, True]
    assert hash_of(skipping) != hash_of(config)
    assert hash_of(load_config(run_file, ["task.skip_bad=true", "safety.skip_bad=true"])) == hash_of(skipping)
    assert hash_of(load_config(run_file, ["task.skip_bad=null"])) == hash_of(config)
