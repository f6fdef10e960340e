"""The replication's page is what its cells give."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from tools.study_page.__main__ import main

from holdfast.core.hashing import sha256_json
from holdfast_lab.study.cells import expand
from holdfast_lab.study.config import load_study
from holdfast_lab.study.protocol import load_protocol
from tests.docs.pictures import plotted_data, without_vectors

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
STUDY = ROOT / "studies" / "replication.yaml"
PAGE = (ROOT / "docs" / "replication.md").read_text(encoding="utf-8")
REPORTED = "HOLDFAST_REPORTED"


def write(tmp_path: Path, *options: str) -> str:
    """The page as the stored cells give it."""
    shutil.copytree(ROOT / "studies", tmp_path / "studies")
    shutil.copytree(RESULTS / "study", tmp_path / "benchmarks" / "results" / "study")
    (tmp_path / "docs").mkdir()
    page = Path(shutil.copy(ROOT / "docs" / "replication.md", tmp_path / "docs"))
    assert main([str(RESULTS / "replication"), "--page", str(page), *options]) == 0
    return page.read_text(encoding="utf-8")


def test_the_page_and_its_pictures_are_written_from_the_stored_cells(tmp_path, monkeypatch):
    monkeypatch.delenv(REPORTED, raising=False)
    without_vectors(monkeypatch)
    assert write(tmp_path) == PAGE
    committed = ROOT / "docs" / "replication"
    drawn = sorted((tmp_path / "docs" / "replication").iterdir())
    assert [path.name for path in drawn] == sorted(path.name for path in committed.iterdir())
    for path in drawn:
        assert plotted_data(path) == plotted_data(committed / path.name), path.name


@pytest.mark.skipif(REPORTED not in os.environ, reason=f"{REPORTED} is not set")
def test_the_orders_beside_the_papers_are_those_of_its_figures(tmp_path):
    assert write(tmp_path, "--reported", os.environ[REPORTED], "--reported-model", "Qwen-3.5-4B") == PAGE


def test_the_study_has_the_protocol_of_its_cells_and_counts_them():
    cells = [json.loads(path.read_text()) for path in (RESULTS / "replication").glob("*.json")]
    study = load_study(STUDY)
    assert {cell["cell"] for cell in cells} <= {cell.id for cell in expand(study)}
    (hashed,) = {cell["protocol_sha256"] for cell in cells}
    protocol = load_protocol(study.preset, study.protocol)
    record = protocol.record(judge=cells[0]["protocol"]["evaluation"]["judge"], roles=cells[0]["protocol"]["data"])
    assert sha256_json(record) == hashed
    said = re.search(r"^# (\d+) cells", STUDY.read_text(), re.M)
    assert said is not None
    assert int(said.group(1)) == len(expand(study))
