"""What the first release (commit 5ed8a18) wrote is refused with a sentence: its files carry no checksums.

`first_release/` was made by that commit's `holdfast train` and `holdfast certify` on a tiny model; places were made
relative.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.runs.config import load_config
from holdfast.runs.load_finished import finished_run

STORED = Path(__file__).parent / "first_release"


def test_a_run_folder_is_refused():
    with pytest.raises(CheckpointError, match="the first release of holdfast wrote none") as caught:
        finished_run(STORED / "run")
    assert "train again" in caught.value.remedy


def test_an_audit_is_refused():
    with pytest.raises(CheckpointError, match="the first release of holdfast wrote none") as caught:
        hf.Audit.load(STORED / "run")
    assert "holdfast audit again" in caught.value.remedy


def test_a_certificate_is_refused():
    with pytest.raises(CheckpointError, match="version 1, expected 2") as caught:
        hf.verify(STORED / "certificate" / "certificate.json")
    assert "holdfast version that wrote it" in caught.value.remedy


def test_its_settings_name_the_new_spelling(tmp_path):
    shutil.copy(STORED / "run" / "config.yaml", tmp_path / "run.yaml")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.yaml")
    assert "its options are written with the defense now" in str(caught.value)
    assert "train.skip_inactive_rows" in str(caught.value)
